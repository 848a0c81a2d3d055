"""Updates through a folder that both sides reach: a disk, a shared filesystem, an object store."""
