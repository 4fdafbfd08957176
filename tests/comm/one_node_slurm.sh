#!/usr/bin/env bash
# Runs a command with srun on a Slurm of one node that lives in a temporary folder for as long as the command does:
#   one_node_slurm.sh TASKS COMMAND ARGS...
# Exit code 77 and one line that says why, where the daemons cannot run here.
set -uo pipefail

tasks=$1
shift
skip() { echo "skipped: $*"; exit 77; }
for tool in munged slurmctld slurmd srun; do
  PATH=$PATH:/usr/sbin command -v "$tool" >/dev/null || skip "$tool is not installed"
done
[ "$(id -u)" -eq 0 ] || skip "Slurm's daemons need root"
PATH=$PATH:/usr/sbin

home=$(mktemp -d)
chmod 755 "$home"
mkdir -m 755 "$home/munge" "$home/state" "$home/spool"
daemons=()
# The last one started first: what a daemon still has to say goes through those started before it.
finish() {
  for ((at = ${#daemons[@]} - 1; at >= 0; --at)); do
    kill "${daemons[at]}" 2>/dev/null
    for _ in $(seq 100); do kill -0 "${daemons[at]}" 2>/dev/null || break; sleep 0.05; done
    kill -9 "${daemons[at]}" 2>/dev/null
    wait "${daemons[at]}" 2>/dev/null
  done
  rm -rf "$home"
}
trap finish EXIT

# Below the range from which the kernel gives ports to whoever asks for any, so that none of these takes one meanwhile.
free_ports() {
  python3 -c 'import random, socket
held = []
while len(held) < 2:
    s = socket.socket()
    try:
        s.bind(("", random.randrange(12000, 32000)))
        held.append(s)
    except OSError:
        s.close()
print(*(s.getsockname()[1] for s in held))'
}
read -r control_port node_port < <(free_ports)
node=$(hostname -s)

head -c 1024 /dev/urandom > "$home/munge/key"
chmod 400 "$home/munge/key"
munged --foreground --force --key-file "$home/munge/key" --socket "$home/munge/socket" --pid-file "$home/munge/pid" \
  --log-file "$home/munge/log" --seed-file "$home/munge/seed" > "$home/munge/out" 2>&1 &
daemons+=($!)

cat > "$home/slurm.conf" <<CONF
ClusterName=one
FirstJobId=$((1000 + RANDOM % 9000))
SlurmctldHost=$node(127.0.0.1)
SlurmctldPort=$control_port
SlurmdPort=$node_port
AuthType=auth/munge
AuthInfo=socket=$home/munge/socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$home/state
SlurmdSpoolDir=$home/spool
SlurmctldPidFile=$home/slurmctld.pid
SlurmdPidFile=$home/slurmd.pid
SlurmctldLogFile=$home/slurmctld.log
SlurmdLogFile=$home/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=5
NodeName=$node NodeAddr=127.0.0.1 CPUs=$tasks State=UNKNOWN
PartitionName=all Nodes=$node Default=YES MaxTime=5 State=UP OverSubscribe=FORCE
CONF
export SLURM_CONF=$home/slurm.conf

wait_until() { for _ in $(seq 200); do "$@" >/dev/null 2>&1 && return 0; sleep 0.05; done; return 1; }
wait_until test -S "$home/munge/socket" || skip "munged does not start: $(tail -n 1 "$home/munge/out" "$home/munge/log" 2>/dev/null | tail -n 1)"
slurmctld -D > "$home/slurmctld.out" 2>&1 &
daemons+=($!)
slurmd -D > "$home/slurmd.out" 2>&1 &
daemons+=($!)
node_is_up() { [ "$(sinfo -h -o %T)" = idle ]; }
wait_until node_is_up || skip "Slurm does not start: $(grep -hE 'error|fatal' "$home"/slurm*.log "$home"/slurm*.out 2>/dev/null | head -n 2 | tr '\n' ' ')"

timeout 60 srun --overcommit --label -n "$tasks" "$@"
code=$?
wait_until node_is_up  # the step's own end has been told
exit $code
