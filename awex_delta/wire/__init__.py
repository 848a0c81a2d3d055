"""Bytes on the wire: frames (header, checksum, regions) and the codecs that fill them."""
