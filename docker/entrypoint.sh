#!/usr/bin/env bash
# Entry point of the image:
#   sshd                  a host for the launchers of others: sshd (the default)
#   with-sshd COMMAND...  sshd in the background and COMMAND: the host that launches
#   COMMAND...            COMMAND alone
# Keys are read from SSH_KEYS (/ssh): authorized_keys, and the private key id_* where a launcher shall run. SSH_PORT (2222)
# is the port of this sshd and of those that ssh logs in to.
set -euo pipefail

keys=${SSH_KEYS:-/ssh}
port=${SSH_PORT:-2222}
state=${HOME:=/}/.sshd

say() { printf 'megatron-acco: %s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

warn_of_little_shared_memory() {
    local free
    free=$(df --output=avail --block-size=1M /dev/shm 2>/dev/null | tail -n 1 | tr -d ' ') || free=0
    [ "$free" -ge 1000 ] || say "warning: /dev/shm has $free MiB free, which is little for NCCL, the data loader or" \
        "several ranks on CPUs; start the container with --shm-size 8g (compose: shm_size)"
}

# Copies, since ssh and sshd refuse mounted files with the owner or the rights that they have outside.
copy_key() {
    [ -r "$1" ] || die "cannot read $1, of user $(stat -c %u "$1"), as user $(id -u): give it that owner" \
        "(chown $(id -u)), or build the image with --build-arg USER_ID= and its owner, who must not be root"
    install -m 600 "$1" "$HOME/.ssh/${1##*/}"
}

prepare_ssh() {
    local key
    id -un >/dev/null 2>&1 || die "ssh knows no user $(id -u): leave --user out, or build the image with --build-arg" \
        "USER_ID=$(id -u)"
    [ -x "$keys" ] || [ ! -d "$keys" ] || die "cannot read the folder $keys as user $(id -u)"
    [ -f "$keys/authorized_keys" ] ||
        die "sshd needs the public key of who may log in: mount a folder with authorized_keys at $keys"
    mkdir -p -m 700 "$HOME/.ssh" "$state"
    copy_key "$keys/authorized_keys"
    ssh-keygen -lf "$HOME/.ssh/authorized_keys" >/dev/null 2>&1 || die "no public key in $keys/authorized_keys"
    # The other containers' host keys are as new as this one's: the first login learns them, anew after every start.
    rm -f "$HOME/.ssh/known_hosts"
    local -a config=('Host *' "    Port $port" '    StrictHostKeyChecking accept-new' '    LogLevel ERROR')
    for key in "$keys"/id_*; do
        [ -f "$key" ] || continue
        copy_key "$key"
        [[ $key != *.pub ]] || continue
        # A login cannot ask, and says no more than "permission denied".
        ssh-keygen -yP '' -f "$HOME/.ssh/${key##*/}" >/dev/null 2>&1 ||
            die "$key is not a private key, or one with a passphrase"
        config+=("    IdentityFile ~/.ssh/${key##*/}")
    done
    [ -e "$HOME/.ssh/config" ] || printf '%s\n' "${config[@]}" >"$HOME/.ssh/config"
    [ "$(id -u)" != 0 ] || mkdir -p /run/sshd
    [ -e "$state/host_key" ] || ssh-keygen -q -t ed25519 -N '' -C "$(hostname)" -f "$state/host_key"
    write_environment
}

# What the container was started with reaches the ranks that a login starts.
write_environment() {
    local entry
    while IFS= read -r -d '' entry; do
        case $entry in
            HOME=* | USER=* | LOGNAME=* | SHELL=* | PWD=* | OLDPWD=* | SHLVL=* | TERM=* | _=* | *$'\n'*) ;;
            *) printf '%s\n' "$entry" ;;
        esac
    done < <(env -0) | install -m 600 /dev/stdin "$HOME/.ssh/environment"
}

sshd=(/usr/sbin/sshd -D -f "$(dirname "${BASH_SOURCE[0]}")/sshd_config" -p "$port" -h "$state/host_key" -o PidFile=none)

# For the health check: that the set-up is done, and the port of an sshd. What an earlier start left says nothing.
say_ready() { mkdir -p -m 700 "$state" && echo "$1" >"$state/ready"; }

# The ranks of this container, whoever started them: the command, a login, docker exec. A container that is a rank itself
# has no others. With --pid host those of other containers are in sight.
ranks() {
    local pid
    [ -z "${LOCAL_RANK+x}" ] || return 0
    for pid in $(grep -lzs '^LOCAL_RANK=' /proc/[0-9]*/environ | cut -d / -f 3); do
        [ ! "/proc/$pid/ns/mnt" -ef /proc/self/ns/mnt ] || echo "$pid"
    done
}

# What `docker stop` asks for. Launchers do not pass it on, and with the first process all others would be killed: let the
# ranks save and end, then the launcher by itself.
stop() {
    local pids
    pids=$(ranks)
    if [ -n "$pids" ]; then
        say "stopping the ranks"
        kill -TERM $pids 2>/dev/null || true
        while [ -n "$(ranks)" ]; do sleep 0.2; done
        for _ in {1..50}; do sleep 0.2; kill -0 "$1" 2>/dev/null || return 0; done
    fi
    kill -TERM "$1" 2>/dev/null || true
}

# Runs a command and ends as it does.
run() {
    local child signalled code
    # What bash starts in the background ignores these signals and reads nothing.
    env --default-signal=INT,QUIT -- "$@" <&0 &
    child=$!
    trap 'signalled=yes; stop "$child" &' TERM USR1
    # From a terminal the command has it too.
    trap 'signalled=yes; if [ ! -t 0 ]; then stop "$child" & fi' INT
    while signalled=; code=0; wait "$child" || code=$?; [ -n "$signalled" ]; do :; done
    exit "$code"
}

rm -f "$state/ready"
warn_of_little_shared_memory
case ${1:-} in
    sshd)
        prepare_ssh
        say_ready "$port"
        run "${sshd[@]}" -e
        ;;
    with-sshd)
        shift
        [ $# -gt 0 ] || die "with-sshd needs a command"
        prepare_ssh
        rm -f "$state/log"
        "${sshd[@]}" -E "$state/log" >/dev/null 2>>"$state/log" &
        trap "kill $! 2>/dev/null || true" EXIT
        # Its own word: on the machine's network another container's sshd may answer at this port.
        for _ in {1..100}; do
            if grep -qs 'Server listening' "$state/log"; then
                say_ready "$port"
                run "$@"
            fi
            kill -0 $! 2>/dev/null || break
            sleep 0.1
        done
        die "sshd does not listen on port $port: $(tail -n 3 "$state/log")"
        ;;
    *)
        [ $# -gt 0 ] || die "needs a command"
        say_ready "" || say "warning: the health check will fail: cannot write $state"
        run "$@"
        ;;
esac
