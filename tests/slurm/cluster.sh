#!/usr/bin/env bash
# A real Slurm of two nodes on this machine, for tests: slurmctld and two slurmd as plain processes, without systemd, munge or
# cgroups, in a folder of their own and on ports that were free.
#
#   eval "$(tests/slurm/cluster.sh start DIR)"    starts it, and sets SLURM_CONF for srun, sbatch, squeue, …
#   tests/slurm/cluster.sh stop DIR               cancels all jobs and ends every process that it started
set -euo pipefail

nodes=(n1 n2)
cpus_per_node=8
start_attempts=3
ready_seconds=30
stop_seconds=3

say() { echo "slurm: $*" >&2; }

usage() {
    sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

# The moment a process started: with its number, a name that is never given twice. Nothing for one that is dead.
born() { sed -n 's/.*) //; /^[ZX]/!p' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }

remember() { echo "$1 $2 $(born "$2")" >>"$dir/processes"; }

# The processes that were started here and still run.
running() {
    [ -f "$dir/processes" ] || return 0
    while read -r _ pid when; do
        if [ -n "$when" ] && [ "$(born "$pid")" = "$when" ]; then echo "$pid"; fi
    done <"$dir/processes"
}

# All descendants of these processes.
below() {
    local pid
    for pid in "$@"; do
        # shellcheck disable=SC2046 # numbers
        set -- $(ps -o pid= --ppid "$pid" || true)
        [ $# -eq 0 ] || { echo "$@"; below "$@"; }
    done
}

# Steps outlive their slurmd, and what a job started may outlive its step; both carry the folder in their environment.
strays() {
    local file pid
    for file in /proc/[0-9]*/environ; do
        pid=$(basename "${file%/environ}")
        if [ "$pid" != $$ ] && { grep -qszxF "KOLO_SLURM_FOLDER=$dir" "$file" ||
            { grep -qszxF "SLURM_CONF=$dir/slurm.conf" "$file" && grep -qsz '^SLURM_JOB_ID=' "$file"; }; }; then
            echo "$pid"
        fi
    done
}

free_port() {
    local port
    while :; do
        port=$((20000 + RANDOM % 12000))
        case " ${ports[*]-} " in *" $port "*) continue ;; esac
        if ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
            ports+=("$port")
            return
        fi
    done
}

write_configuration() {
    ports=()
    local host user node
    host=$(hostname -s)
    user=$(id -un)
    for node in controller daemon "${nodes[@]}"; do free_port; done
    {
        cat <<END
ClusterName=kolo
SlurmctldHost=$host(127.0.0.1)
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/none
CredType=cred/none
SlurmctldPort=${ports[0]}
SlurmdPort=${ports[1]}
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
TmpFS=$dir/tmp/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=2
SlurmdParameters=config_overrides
END
        local at=2
        for node in "${nodes[@]}"; do
            echo "NodeName=$node NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[at]} CPUs=$cpus_per_node RealMemory=1000 State=UNKNOWN"
            at=$((at + 1))
        done
        echo "PartitionName=all Nodes=$(IFS=,; echo "${nodes[*]}") Default=YES MaxTime=INFINITE State=UP"
    } >"$dir/slurm.conf"
}

launch() {
    local name=$1
    shift
    KOLO_SLURM_FOLDER=$dir setsid "$@" </dev/null >>"$dir/$name.out" 2>&1 9>&- &
    remember "$name" $!
}

# Whether all nodes are idle; fails for good when a daemon is gone.
is_ready() {
    [ "$(running | wc -l)" -eq $((1 + ${#nodes[@]})) ] || return 2
    [ "$(sinfo -h -N -o '%t' 2>/dev/null | grep -cx idle)" -eq ${#nodes[@]} ] || return 1
}

try_start() {
    rm -rf "$dir/state" "$dir/spool" "$dir/tmp" "$dir/processes" "$dir"/*.log "$dir"/*.out "$dir"/*.pid
    mkdir -p "$dir/state" "$dir/spool"
    write_configuration
    launch slurmctld slurmctld -D
    local node status until
    for node in "${nodes[@]}"; do
        mkdir -p "$dir/spool/$node" "$dir/tmp/$node"
        launch "slurmd-$node" slurmd -D -N "$node"
    done
    until=$((SECONDS + ready_seconds))
    while [ $SECONDS -lt $until ]; do
        status=0
        is_ready || status=$?
        case $status in 0) return 0 ;; 2) break ;; esac
        sleep 0.1
    done
    return 1
}

start() {
    local program attempt
    for program in slurmctld slurmd srun sinfo setsid; do
        command -v $program >/dev/null || { say "$program is not installed (Debian: slurm-wlm)"; exit 1; }
    done
    if [ -n "$(running)" ]; then
        say "a cluster runs in $dir already; stop it first"
        exit 1
    fi
    if [ ! -f "$dir/slurm.conf" ] && [ -n "$(ls -A --ignore=lock "$dir")" ]; then
        say "$dir is not empty, and not one of mine; name another folder"
        exit 1
    fi
    trap 'stop; exit 1' HUP INT TERM
    for ((attempt = 1; attempt <= start_attempts; attempt++)); do
        if try_start; then
            echo "export SLURM_CONF=$dir/slurm.conf"
            say "${#nodes[@]} nodes of $cpus_per_node CPUs; try: SLURM_CONF=$dir/slurm.conf srun -N 2 -n 4 hostname"
            return
        fi
        say "attempt $attempt of $start_attempts: the nodes did not become idle"
        tail -n 5 "$dir"/*.log "$dir"/*.out >&2 || true
        stop
    done
    exit 1
}

# Sends a signal to all that still runs; fails when nothing does.
signal_all() {
    local signal=$1
    # shellcheck disable=SC2046 # numbers
    set -- $(running) $(strays)
    [ $# -gt 0 ] || return 1
    # shellcheck disable=SC2046 # numbers
    kill "-$signal" "$@" $(below "$@") 2>/dev/null || true
}

stop() {
    local until
    if [ -n "$(running)" ]; then
        timeout 5 scancel --signal=KILL --full --user="$(id -un)" 2>/dev/null || true
        timeout 5 scancel --user="$(id -un)" 2>/dev/null || true
        until=$((SECONDS + stop_seconds))
        while [ $SECONDS -lt $until ] && [ -n "$(timeout 2 squeue -h 2>/dev/null || true)" ]; do sleep 0.1; done
    fi
    local tries
    for ((tries = 0; tries < 20; tries++)); do
        signal_all TERM || break
        sleep 0.1
    done
    for ((tries = 0; tries < 20; tries++)); do
        signal_all KILL || break
        sleep 0.1
    done
    rm -f "$dir/processes"
}

[ $# -eq 2 ] || usage
export PATH="$PATH:/usr/sbin:/sbin"
case $1 in
start)
    mkdir -p "$2"
    dir=$(cd "$2" && pwd -P)
    ;;
stop)
    [ -d "$2" ] || exit 0
    dir=$(cd "$2" && pwd -P)
    ;;
*) usage ;;
esac
export SLURM_CONF="$dir/slurm.conf"
# Inside another cluster's job the tools would ask that one.
unset "${!SLURM_JOB@}" "${!SLURM_STEP@}" 2>/dev/null || true
exec 9>"$dir/lock"
flock -w 120 9 || { say "somebody else starts or stops the cluster in $dir"; exit 1; }
"$1"
