"""What a lab boots: Debian's kernel, unpacked but not installed, and a small initramfs.

Both are kept in BUILD/lab and made when missing; labs that start at the same time wait for the first one's lock.
`Image.prepare` raises Unavailable, with a reason that a person can act on, where a lab cannot be had.
"""

import contextlib
import fcntl
import hashlib
import lzma
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
QEMU = "qemu-system-x86_64"
BUSYBOX = "/bin/busybox"
KERNEL_PACKAGE = "linux-image-amd64"

# What must be there before the machine's own / is, and what would cost a modprobe at each boot.
BASE_MODULES = ("virtio_pci virtio_console virtio_net 9p 9pnet_virtio overlay veth "
                "unix_diag tcp_diag udp_diag").split()
RDMA_MODULES = "rdma_rxe rdma_ucm ib_uverbs rdma_cm".split()
# The rest of the kernel's modules stay loadable in a guest (netem, nft, smc, ...); these folders are all that a lab
# can use of 400 MB.
KEPT_MODULES = ("net lib crypto arch fs/9p fs/netfs fs/fscache fs/configfs fs/overlayfs drivers/virtio "
                "drivers/infiniband/core drivers/infiniband/sw drivers/char").split()

APT = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "-o", "DPkg::Lock::Timeout=300"]


class Unavailable(Exception):
    """No lab on this machine; the text says why. A test ends with status 77 on it."""


def _run(argv, seconds=300, **options):
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds,
                              **options)
    except FileNotFoundError:
        raise Unavailable(f"{argv[0]} is not installed (scripts/lib/deps.sh lab)") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"`{' '.join(map(str, argv))}` did not end within {seconds} s") from None
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split())[-300:]
        raise Unavailable(f"`{' '.join(map(str, argv))}` failed: {words}")
    return done.stdout


@contextlib.contextmanager
def _locked(path):
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _made_aside(target):
    """A fresh folder that takes the name `target` once it is complete: nobody sees half of it."""
    aside = pathlib.Path(tempfile.mkdtemp(prefix=".new-", dir=target.parent))
    try:
        yield aside
        aside.chmod(0o755)
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


class Image:
    """`kernel`, `initramfs`, `modules` (a folder for /lib/modules/VERSION) and `accel` ("kvm" or "tcg")."""

    def __init__(self, build_dir):
        self.folder = pathlib.Path(build_dir).resolve() / "lab"

    def prepare(self):
        if platform.machine() != "x86_64":
            raise Unavailable(f"guests are x86_64, and this machine is {platform.machine()}")
        missing = [p for p in (QEMU, "modprobe", "depmod", "cpio", "ip", "rdma") if not shutil.which(p)]
        missing += [] if os.path.exists(BUSYBOX) else [BUSYBOX]
        if missing:
            raise Unavailable(f"not installed: {', '.join(missing)} (scripts/lib/deps.sh lab)")
        self.folder.mkdir(parents=True, exist_ok=True)
        with _locked(self.folder / "lock"):
            root = self._kernel_root()
            version = next((root / "lib/modules").iterdir()).name
            self.kernel = root / f"boot/vmlinuz-{version}"
            self.modules = root / f"lib/modules/{version}"
            self.initramfs = self._initramfs(root, version)
            self.accel = self._accelerator()
        return self

    def _kernel_root(self):
        """An unpacked kernel: the one that is there (no network then), else the distribution's newest."""
        known = sorted(self.folder.glob("linux-image-*"))
        if known:
            return known[-1]
        package = self._kernel_package()
        target = self.folder / package
        with _made_aside(target) as root, tempfile.TemporaryDirectory(dir=self.folder) as work:
            _run(APT + ["download", package], 900, cwd=work)
            _run(["dpkg", "-x", next(pathlib.Path(work).glob("*.deb")), f"{work}/all"])
            version = next(pathlib.Path(work, "all/lib/modules").iterdir()).name
            (root / "boot").mkdir()
            shutil.move(f"{work}/all/boot/vmlinuz-{version}", root / "boot")
            self._keep_modules(pathlib.Path(work, "all/lib/modules", version), root / "lib/modules" / version)
            _run(["depmod", "-b", root, version])
        return target

    def _kernel_package(self):
        for attempt in ("as it is", "updated"):
            if attempt == "updated":
                _run(APT + ["update"])
            for line in _run(["apt-cache", "depends", KERNEL_PACKAGE]).splitlines():
                if "Depends: linux-image-" in line:
                    return line.split()[-1]
        raise Unavailable(f"apt knows no package {KERNEL_PACKAGE}")

    @staticmethod
    def _keep_modules(source, target):
        target.mkdir(parents=True)
        for name in source.glob("modules.*"):
            shutil.copy(name, target)
        for folder in KEPT_MODULES:
            if (source / "kernel" / folder).is_dir():
                shutil.copytree(source / "kernel" / folder, target / "kernel" / folder)
        net = target / "kernel/drivers/net"
        net.mkdir()
        for module in (source / "kernel/drivers/net").glob("*.ko*"):  # veth, tun, macvlan: not the cards' folders
            shutil.copy(module, net)

    def _initramfs(self, root, version):
        parts = [HERE / "lab_init.sh", HERE / "lab_agent.py"]
        key = hashlib.sha256(repr([BASE_MODULES, RDMA_MODULES]).encode())
        key.update(_read_module(pathlib.Path(BUSYBOX)))
        for part in parts:
            key.update(part.read_bytes())
        target = self.folder / f"initramfs-{version}-{key.hexdigest()[:12]}"
        if target.exists():
            return target
        with tempfile.TemporaryDirectory(dir=self.folder) as work:
            tree = pathlib.Path(work, "tree")
            for folder in ("bin", "proc", "sys", "dev", "lower", "upper", "root", "modules"):
                (tree / folder).mkdir(parents=True)
            shutil.copy(BUSYBOX, tree / "bin/busybox")
            shutil.copy(parts[0], tree / "init")
            shutil.copy(parts[1], tree / "agent.py")
            (tree / "init").chmod(0o755)
            seen = set()
            for name, wanted in (("base", BASE_MODULES), ("rdma", RDMA_MODULES)):
                files = [f for m in wanted for f in _load_order(root, version, m)]
                files = [f for f in dict.fromkeys(files) if f not in seen]
                seen.update(files)
                names = [f.name.split(".ko")[0] + ".ko" for f in files]
                for file, plain in zip(files, names):
                    (tree / "modules" / plain).write_bytes(_read_module(file))
                (tree / "modules" / name).write_text("\n".join(names) + "\n")
            archive = pathlib.Path(work, "archive")
            # Not compressed: an emulated processor unpacks more slowly than the machine reads.
            with open(archive, "wb") as out:
                files = "\n".join(str(p.relative_to(tree)) for p in sorted(tree.rglob("*")))
                done = subprocess.run(["cpio", "-o", "-H", "newc", "--quiet", "-R", "0:0"], cwd=tree,
                                      input=files.encode(), stdout=out, stderr=subprocess.PIPE, timeout=60)
            if done.returncode:
                raise Unavailable("cpio failed: " + done.stderr.decode(errors="replace"))
            for old in self.folder.glob(f"initramfs-{version}-*"):
                old.unlink()  # running guests have read theirs
            archive.rename(target)
        return target

    def _accelerator(self):
        """/dev/kvm can exist, open, and then never run a single instruction: only a boot is a proof.

        The kernel finds no root, panics, and thereby ends qemu. Kept per boot of this machine.
        """
        if not os.access("/dev/kvm", os.R_OK | os.W_OK):
            return "tcg"
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        memo = self.folder / f"accel-{boot}"
        if not memo.exists():
            argv = [QEMU, "-M", "q35", "-accel", "kvm", "-cpu", "max", "-m", "256", "-nodefaults",
                    "-display", "none", "-no-reboot", "-kernel", self.kernel, "-append", "quiet panic=-1"]
            try:
                _run(argv, 10)
                memo.write_text("kvm")
            except Unavailable:
                memo.write_text("tcg")
        return memo.read_text()


def _load_order(root, version, module):
    """The files of a module and of what it needs, first to load first. Built-in ones have none."""
    shown = _run(["modprobe", "-S", version, "-d", root, "--show-depends", module])
    return [pathlib.Path(line.split()[1]) for line in shown.splitlines() if line.startswith("insmod ")]


def _read_module(file):
    data = file.read_bytes()
    return lzma.decompress(data) if file.suffix == ".xz" else data
