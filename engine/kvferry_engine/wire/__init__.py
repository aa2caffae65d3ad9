"""What processes say to each other, so that every package can read it without torch.

Only msgspec and the standard library are imported here (``wire.sockets`` adds pyzmq and is imported by name where sockets
are made). The story continues in `messages`.
"""
