"""The rank processes of one instance: how they meet, what they are told, and how a loss is seen."""
