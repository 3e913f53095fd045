"""Clients of PostgreSQL that stop in the middle of things, and as much of its protocol (3.0) as they need.

psql says and does too much by itself: here a test decides when a message is sent, when nobody reads, and how the
connection ends. What a client returns is what it saw, to be compared.
"""

import os
import signal
import socket
import struct
import time

import services


class Failed(Exception):
    """An ErrorResponse: its severity, code and message."""

    def __init__(self, body):
        fields = {field[:1]: field[1:].decode() for field in body.split(b"\0") if field}
        self.seen = [fields[b"S"], fields[b"C"], fields[b"M"]]
        super().__init__(str(self.seen))


class Talk:
    """One connection, at rest between statements. Everything waits 20 s at most."""

    def __init__(self, port, timeout=20):
        self.port = int(port)
        self.socket = socket.create_connection((services.HOST, self.port), timeout=timeout)
        self.buffer = bytearray()
        self.notices, self.notifications = [], []
        body = struct.pack("!I", 3 << 16) + b"user\0postgres\0database\0postgres\0\0"
        self.socket.sendall(struct.pack("!I", len(body) + 4) + body)
        self.key = b""
        for kind, body in self.messages():
            if kind == b"K":
                self.key = body
        self.pid = struct.unpack("!I", self.key[:4])[0]

    # ---- messages ---------------------------------------------------------------------------------

    def send(self, kind, body=b""):
        self.socket.sendall(kind + struct.pack("!I", len(body) + 4) + body)

    def receive(self):
        """(kind, body); EOFError at the end of the stream, also in the middle of a message."""
        while len(self.buffer) < 5 or len(self.buffer) < 1 + struct.unpack("!I", self.buffer[1:5])[0]:
            piece = self.socket.recv(1 << 17)
            if not piece:
                raise EOFError("%d bytes of a message" % len(self.buffer))
            self.buffer += piece
        end = 1 + struct.unpack("!I", self.buffer[1:5])[0]
        kind, body = bytes(self.buffer[:1]), bytes(self.buffer[5:end])
        del self.buffer[:end]
        return kind, body

    def messages(self):
        """What comes until the server is ready again; its errors are raised when it is."""
        failed = None
        while True:
            kind, body = self.receive()
            if kind == b"Z":
                if failed:
                    raise failed
                return
            if kind == b"E":
                failed = Failed(body)
                if failed.seen[0] == "FATAL":
                    raise failed
            elif kind == b"N":
                self.notices.append(Failed(body).seen)
            elif kind == b"A":
                self.notifications.append([text.decode() for text in body[4:].split(b"\0")[:2]])
            else:
                yield kind, body

    # ---- statements -------------------------------------------------------------------------------

    def begin(self, statement):
        self.send(b"Q", statement.encode() + b"\0")

    def ask(self, statement):
        """The rows of a statement, each a list of texts."""
        self.begin(statement)
        rows = []
        for kind, body in self.messages():
            if kind == b"D":
                row, at = [], 2
                for _ in range(struct.unpack("!H", body[:2])[0]):
                    size = struct.unpack("!i", body[at:at + 4])[0]
                    row.append(None if size < 0 else body[at + 4:at + 4 + size].decode())
                    at += 4 + max(size, 0)
                rows.append(row)
        return rows

    def warm_up(self):
        """Traffic until the stream should be lifted."""
        for _ in range(2):
            for _ in range(40):
                self.ask("select repeat('z', 4000)")
            time.sleep(0.15)
        self.ask("select repeat('z', 4000)")
        return self

    def error_of(self, statement=None):
        """The error that a statement, or what has been begun, ends with; None if there is none."""
        try:
            if statement:
                self.begin(statement)
            for _ in self.messages():
                pass
        except Failed as why:
            return why.seen
        return None

    def begin_copy_in(self, statement):
        self.begin(statement)
        kind, body = self.receive()
        if kind != b"G":
            raise RuntimeError("no CopyInResponse: %r %r" % (kind, body[:200]))

    def last_words(self):
        """What the server says before the connection ends, and how that is; the rows of a COPY on the way there."""
        words, rows = [], []
        try:
            while True:
                kind, body = self.receive()
                if kind in (b"E", b"N"):
                    words.append(Failed(body).seen)
                elif kind == b"d":
                    rows.append(body)
        except EOFError:
            words.append("end of stream")
        except OSError as why:
            words.append(type(why).__name__)
        return words, rows

    def cancel(self):
        """Asks for the end of the running statement: by a connection of its own, as the protocol wants it."""
        with socket.create_connection((services.HOST, self.port), timeout=20) as other:
            other.sendall(struct.pack("!II", 16, (1234 << 16) + 5678) + self.key)
            while other.recv(100):
                pass

    def close(self):
        self.send(b"X")
        self.socket.close()


# ---- clients of the driver's ------------------------------------------------------------------------------

ROWS = "copy (select n, repeat('x', 900) from generate_series(1, 2000000) n) to stdout"  # 1.8 GB, if it came to that
BUSY = 5000  # rows that are taken before nobody reads any more
ROW = b"7\t" + b"y" * 4000 + b"\n"


def right_rows(rows, first=1):
    """Whether these are ROWS, from that one on."""
    return all(row == b"%d\t%s\n" % (n, b"x" * 900) for n, row in enumerate(rows, first))


def take_rows(talk, number):
    """So many ROWS as they come; whether they are what they should be."""
    rows = []
    while len(rows) < number:
        kind, body = talk.receive()
        if kind == b"d":
            rows.append(body)
    return right_rows(rows)


def cancel(port):
    talk, seen = Talk(port), []
    talk.ask("create table kept (id int, v text)")

    def see(what, *more):
        seen.append([what, *more, talk.ask("select 6 * 7, count(*) from kept")])

    for n in range(3):
        talk.begin(ROWS)
        right = take_rows(talk, 20000)
        talk.cancel()
        see("out", right, talk.error_of())
    talk.begin_copy_in("copy kept from stdin")
    for _ in range(3000):
        talk.send(b"d", ROW)
    talk.send(b"f", b"not today\0")
    see("in, by the client", talk.error_of())
    talk.begin_copy_in("copy kept from stdin")
    for n in range(6000):
        talk.send(b"d", ROW)
        if n == 3000:
            talk.cancel()
    talk.send(b"c")
    see("in, by a request", talk.error_of())
    # The server is in the middle of a send when its time is over: the row comes whole, then the error.
    talk.ask("set statement_timeout = 700")
    talk.begin(ROWS)
    time.sleep(1.2)
    right = take_rows(talk, 2000)
    see("out, by the server's clock", right, talk.error_of())
    talk.ask("set statement_timeout = 0")
    talk.begin_copy_in("copy kept from stdin")
    for _ in range(1000):
        talk.send(b"d", ROW)
    talk.send(b"c")
    see("in", talk.error_of())
    talk.close()
    return seen


def leave(port):
    """Clients that go in the middle: a clean end, a reset, rows unread. The server has to notice each."""
    watcher, seen = Talk(port), []
    watcher.ask("create table left_ (id int, v text)")
    for how in ("close", "linger", "unread"):
        talk = Talk(port).warm_up()
        if how == "unread":
            talk.begin(ROWS)
            take_rows(talk, 5000)
        else:
            talk.begin_copy_in("copy left_ from stdin")
            for _ in range(3000):
                talk.send(b"d", ROW)
        if how == "linger":
            talk.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        talk.socket.close()
        deadline = time.monotonic() + 15
        while watcher.ask("select count(*) from pg_stat_activity where pid = %d" % talk.pid) != [["0"]]:
            assert time.monotonic() < deadline, "the backend of the client that left stays: " + how
            time.sleep(0.02)
        seen.append([how, watcher.ask("select count(*) from left_")])
    watcher.close()
    return seen


def busy(talk):
    """The backend of this connection fills what is between, and waits for room."""
    talk.begin(ROWS)
    assert take_rows(talk, BUSY), "other rows"
    time.sleep(0.3)


def see_killed(port):
    seen = []
    watcher, idle, copying = (Talk(port).warm_up() for _ in range(3))
    watcher.ask("create table kept as select n from generate_series(1, 1000) n")

    def terminate(talk):
        return watcher.ask("select pg_terminate_backend(%d, 15000)" % talk.pid)

    seen.append(["idle, terminated", terminate(idle), idle.last_words()])
    busy(copying)
    seen.append(["sending, terminated", terminate(copying)])
    words, rows = copying.last_words()
    seen += [words, len(rows) > 1000, right_rows(rows, BUSY + 1)]
    idle, sending, second = (Talk(port).warm_up() for _ in range(3))
    busy(sending)
    idle.ask("begin; insert into kept values (0)")
    time.sleep(0.3)  # one that has not returned from its last send has no words for its end
    os.kill(sending.pid, signal.SIGKILL)  # all of them end, and the server starts anew
    words, rows = sending.last_words()
    seen += [["sending, killed", words, len(rows) > 1000, right_rows(rows, BUSY + 1)],
             ["idle, beside it", idle.last_words()], ["second", second.last_words()], ["watcher", watcher.last_words()]]
    seen.append(again(port).ask("select count(*), sum(n) from kept"))
    taking = again(port)
    taking.ask("create table t (id int, v text)")
    taking.begin_copy_in("copy t from stdin")
    for _ in range(100):
        taking.send(b"d", ROW)
    os.kill(taking.pid, signal.SIGSTOP)
    taking.socket.setblocking(False)
    sent = 0
    try:
        while True:  # as much as goes in: nobody reads it any more
            sent += taking.socket.send(b"d" + (len(ROW) + 4).to_bytes(4, "big") + ROW)
            time.sleep(0.0002)
    except BlockingIOError:
        taking.socket.settimeout(20)
    os.kill(taking.pid, signal.SIGKILL)
    seen += [["taking, killed", sent > 1 << 20, taking.last_words()[0]], again(port).ask("select count(*) from kept")]
    return seen


def again(port):
    """A connection to a server that may be recovering."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return Talk(port).warm_up()
        except (Failed, OSError, EOFError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def notify(port, number):
    """Each says something to all; each hears all of it, in the order of the transactions."""
    talks = [Talk(port) for _ in range(int(number))]
    for talk in talks:
        talk.ask("listen everybody")
    for n in range(50):
        for k, talk in enumerate(talks):
            talk.ask("select pg_notify('everybody', '%d %d ' || repeat('n', 200))" % (n, k))
    for talk in talks:
        deadline = time.monotonic() + 20
        while len(talk.notifications) < 50 * len(talks) and time.monotonic() < deadline:
            talk.ask("select 1")
    said = ["%d %d %s" % (n, k, "n" * 200) for n in range(50) for k in range(len(talks))]
    right = [[text for _, text in talk.notifications] == said for talk in talks]
    for talk in talks:
        talk.close()
    return right
