"""The instance's side of the second tier: which blocks go there, which come back, and who carries them."""
