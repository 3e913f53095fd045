"""Where Debian has the services that are started here, and as whom."""

import glob
import os
import shutil

# By its path: it executes itself once more, without a search.
NGINX = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin") or "nginx"

# The programs themselves: what is in PATH are scripts of postgresql-common that look for the machine's own clusters.
POSTGRES = max(glob.glob("/usr/lib/postgresql/*/bin"), default="/usr/lib/postgresql/15/bin",
               key=lambda path: float(path.split("/")[-2]))
# It refuses to be root.
AS_POSTGRES = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.geteuid() == 0 else []
INITDB = [*AS_POSTGRES, f"{POSTGRES}/initdb", "-A", "trust", "-U", "postgres", "-E", "UTF8", "--locale=C", "--no-sync", "-D"]


def make_postgres_folder(path):
    """For a cluster: its user's."""
    os.mkdir(path)
    if AS_POSTGRES:
        shutil.chown(path, "postgres", "postgres")
