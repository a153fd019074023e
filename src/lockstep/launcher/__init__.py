"""Starting and ending: who this rank is, the world, the launcher."""
