"""A stranger on a keeper's line: says what it is told, and tells what came back.

    line_talk.py ADDRESS PORT HEX...

For each HEX a connection of its own, and a line: `closed` or `open` (2 s after the last byte), and the answer in hex.
"""

import socket
import sys

for words in sys.argv[3:]:
    state, got = "closed", b""
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), 5) as line:
        line.settimeout(2)
        try:
            line.sendall(bytes.fromhex(words))
            while data := line.recv(4096):
                got += data
        except ConnectionError:
            pass
        except TimeoutError:
            state = "open"
    print(state, got.hex(), flush=True)
