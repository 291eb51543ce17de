"""From a prompt to more text: the decoder, which reads tokens, and what is built on it."""
