"""One nginx in a folder of its own, and curl as its client, for the drivers that need a server of HTTP."""

import os

import services
from service_programs import NGINX

MIB = 1 << 20
SIZES = (0, 1, 1447, 65535, 65536, MIB + 1, services.sized(17, 8) * MIB + 13)

# Left to itself nginx drops the environment before it executes its new binary (ngx_set_environment).
KEPT = "".join("env %s;\n" % name for name in (
    "LD_PRELOAD", "RSOCK_PATH", "RSOCK_SUMMARY", "RSOCK_LOG", "RSOCK_LOG_FILE", "RSOCK_STRICT"))

CONFIG = """
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log error;
worker_processes 2;
{user}
{kept}
events {{ worker_connections 512; {events} }}
http {{
  access_log off;
  default_type application/octet-stream;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  client_max_body_size 0; keepalive_requests 100000;
  {http}
  server {{
    listen {host}:{port};
    root {root};
    {server}
  }}
}}
"""


def serve(side, server="", http="sendfile on;", events="", name="nginx", orphan=False):
    """One nginx with a folder of its own; workers of another user when started by root, as Debian has it."""
    folder, root = side.folder / name, side.folder / "www"
    root.mkdir(exist_ok=True)
    root.chmod(0o777)  # what is sent to a worker is stored by another user
    folder.mkdir()

    def argv(port):
        (folder / "nginx.conf").write_text(CONFIG.format(
            folder=folder, host=services.HOST, root=root, port=port, server=server, http=http, events=events, kept=KEPT,
            user="user nobody nogroup;" if os.geteuid() == 0 else ""))
        command = [NGINX, "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]
        # One whose first parent lives takes itself for supervised, and no new binary. The shell's process group stays.
        return ["sh", "-c", '"$@" & sleep 0.5', "sh", *command] if orphan else command
    program, port = side.serve(argv, name)
    return program, port, root


def files(root, sizes=SIZES):
    for size in sizes:
        with open(root / ("%d" % size), "wb") as file:
            file.write(services.known(size, size))


def url(port, path):
    return "http://%s:%s/%s" % (services.HOST, port, path)


def fetch_by_curl(side, port, *paths, label="curl", how=()):
    """All over one connection of curl's."""
    argv = ["curl", "-sS", "--fail", *services.UNHURRIED, *how]
    for path in paths:
        argv += ["-o", side.folder / ("got-%s" % path), url(port, path)]
    text = side.run(argv + ["-w", "%{http_code} %{size_download} %{num_connects}\\n"], lifts=1)
    side.saw(label, text.decode())
    for path in paths:
        got = side.folder / ("got-%s" % path)
        side.demand(services.digest_file(got) == services.digest_file(side.folder / "www" / path),
                    "%s: %s arrived changed" % (label, path))
        got.unlink()


def use_by_curl(side, port, label, how=(), sizes=SIZES):
    """Kept connections, several at once, ranges, uploads. The server has `dav_methods PUT`, `how` leads to it."""
    root = side.folder / "www"
    fetch_by_curl(side, port, *map(str, sizes[1:]), label=label, how=how)
    parts = ["0-0", "1447-65534", "%d-" % (sizes[-1] - MIB), "-70000"]
    for part in parts:
        got = side.run(["curl", "-sS", "--fail", *how, "-r", part, url(port, sizes[-1])])
        side.saw("%s, bytes %s" % (label, part), [len(got), services.digest(got)])
    argv = ["curl", "-sS", "--fail", "-Z", "--parallel-immediate", "--parallel-max", "6", *how]
    for n in range(12):
        argv += ["-o", side.folder / ("at-once-%d" % n), url(port, sizes[-1 - n % 3])]
    side.run(argv, "at_once", lifts=1)
    for n in range(12):
        got = side.folder / ("at-once-%d" % n)
        side.demand(services.digest_file(got) == services.digest_file(root / str(sizes[-1 - n % 3])),
                    "%s: one of several at once arrived changed" % label)
        got.unlink()
    for size in sizes[-2:]:  # these wait for "100 Continue" first
        name = "put-%s-%d" % (label.replace(" ", "-"), size)
        text = side.run(["curl", "-sS", *how, "-T", root / str(size), "-w", "%{http_code} %{size_upload}",
                         url(port, name)])
        side.saw("%s, sent %d" % (label, size), text.decode())
        side.demand(services.digest_file(root / name) == services.digest_file(root / str(size)),
                    "%s: what was stored is not what was sent" % label)
