#!/bin/busybox sh
# A guest's first process: loads the modules, puts a tmpfs over the machine's own / (read-only, by 9p), moves there, and
# runs the agent until the lab hangs up. Everything else is the agent's.
export PATH=/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev

fail() {
  echo "lab: $*" >/dev/console
  poweroff -f
}
load() {
  while read -r module; do
    insmod "/modules/$module" || fail "$module does not load"
  done <"/modules/$1"
}
load base
if grep -q 'lab.rdma=yes' /proc/cmdline; then
  load rdma
fi

mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=262144,cache=loose root /lower || fail "no root over 9p"
mount -t tmpfs -o size=75% upper /upper
mkdir /upper/data /upper/work
mount -t overlay -o lowerdir=/lower,upperdir=/upper/data,workdir=/upper/work root /root || fail "no overlay"
mount --move /proc /root/proc
mount --move /sys /root/sys
mount --move /dev /root/dev
mkdir -p /root/dev/pts /root/dev/shm
mount -t devpts -o mode=620,ptmxmode=666 devpts /root/dev/pts
mount -t tmpfs -o mode=1777 shm /root/dev/shm
mount -t tmpfs -o mode=755 run /root/run
mkdir /root/run/lab /root/run/lock /root/run/netns
cp /bin/busybox /agent.py /root/run/lab/
cat >/root/run/lab/start <<'START'
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 TERM=linux
/usr/bin/python3 -I -S -B /run/lab/agent.py </dev/null >/dev/console 2>&1
/run/lab/busybox poweroff -f
START
# Not chroot: the kernel refuses user namespaces to whoever is in one.
exec switch_root /root /run/lab/busybox sh /run/lab/start
