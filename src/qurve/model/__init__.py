"""The GPT: attention, feed-forward, the whole model."""
