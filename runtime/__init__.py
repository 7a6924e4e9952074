"""Opens an artifact, restores its graphs and replays them."""
