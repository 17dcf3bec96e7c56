"""Load generator for any OpenAI-compatible server: closed loop, open loop and trace replay."""
