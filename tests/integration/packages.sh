#!/bin/sh
# Installs the packages in dist/ in a root file system of a Debian release (scripts/in-debian --copy), uses and purges them. Lines that
# begin with "==" tell test_packages.py where the output of each part begins.
set -eu
suffix=$1 # deb12
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
ours="multiverse-common multiverse-controller multiverse-host multiverse-login multiverse-slurm-plugin"
printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d
chmod 755 /usr/sbin/policy-rc.d
debs=""
for name in $ours; do debs="$debs ./$(ls dist/"$name"_*"$suffix"_*.deb)"; done
say() { echo "== $1"; }
# Everything on the disk but what dpkg, apt and others keep of what they did.
files() {
    find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /run -o -path /tmp -o -path /multiverse -o -path /var/lib/dpkg \
        -o -path /var/lib/apt -o -path /var/cache -o -path /var/log -o -path /mnt -o -path /root \) -prune -o -print | LC_ALL=C sort
}

apt-get update -qq
# shellcheck disable=SC2086  # lists of words
{
    apt-get install -y -qq --no-install-recommends $debs slurm-client systemd man-db > /tmp/apt.log 2>&1 || { tail -20 /tmp/apt.log; exit 1; }
    say "first version"; multiverse --version
    dpkg --purge $ours > /tmp/purge.log 2>&1
    files > /tmp/before
    say "left by name"; grep -i multiverse /tmp/before || true
    dpkg -i $debs > /tmp/dpkg.log 2>&1
}

say "version of a user"; setpriv --reuid=65534 --regid=65534 --clear-groups multiverse --version
say "seconds of CPU for the help"
/usr/bin/python3 -c '
import resource, subprocess
subprocess.run(["multiverse", "--help"], check=True, stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN); print(used.ru_utime + used.ru_stime)'
say "files"; for name in $ours; do dpkg -L "$name"; done | grep -v /opt/multiverse/lib
say "units"; systemd-analyze verify --man=no /usr/lib/systemd/system/multiverse.service /usr/lib/systemd/system/multiverse-agent.service 2>&1
say "enabled"; ls /etc/systemd/system/multi-user.target.wants 2>/dev/null | grep multiverse || true
say "manual page"; MANWIDTH=80 man multiverse-explain 2>/dev/null | head -4

mkdir -p /etc/slurm /etc/multiverse
cat > /etc/slurm/slurm.conf <<'END'
ClusterName=try
SlurmctldHost=localhost
SlurmUser=root
SelectType=select/cons_tres
NodeName=n1 CPUs=1
END
cp -a /etc/slurm /tmp/slurm
printf '[host]\nname = "n1"\ncores = 4\nmemory = 2000\n[job_vms]\nenabled = true\n' > /etc/multiverse/multiverse.toml
say "before"; multiverse doctor --before --no-kvm || true
say "install"; multiverse site install --yes
say "installed"; ls /etc/slurm /etc/systemd/system /etc/tmpfiles.d 2>/dev/null
say "the plugin"; SLURM_CONF=/etc/slurm/slurm.conf srun --help | grep -e --vm-image
say "remove"; multiverse site remove --yes --force
say "removed"; diff -r /etc/slurm /tmp/slurm && echo as before
say "changed files of packages"; dpkg --verify $ours

say "after removal"
# shellcheck disable=SC2086
dpkg --remove $ours > /tmp/dpkg.log 2>&1
find /etc /opt /usr /var/lib -xdev -iname '*multiverse*' ! -path '/var/lib/dpkg/*' ! -path '/var/lib/apt/*' | sort
mkdir -p /var/lib/multiverse/vms
# shellcheck disable=SC2086
dpkg --purge $ours > /tmp/dpkg.log 2>&1
rm /etc/slurm/slurm.conf
files > /tmp/after
say "the directory of add-ons"; ls -d /opt
say "differences after the purge"; diff /tmp/before /tmp/after | grep '^[<>]' || true
say "end"
