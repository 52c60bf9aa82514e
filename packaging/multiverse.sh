# After a restart of slurmctld before Slurm 23.11.4, users' commands find VMs by this slurm.conf, which includes the site's. Root's
# shells must not have it: to slurmctld and slurmd it would declare nodes.
if [ "$(id -u)" != 0 ] && [ -z "${SLURM_CONF:-}" ] && [ -r /etc/slurm/multiverse-client.conf ]; then
    export SLURM_CONF=/etc/slurm/multiverse-client.conf
fi
