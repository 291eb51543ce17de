"""Data: text -> shards and a manifest, the order of the windows, and the loader."""
