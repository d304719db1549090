#!/usr/bin/env bash
# Entry point of the image:
#   sshd                  a host for the launchers of others: sshd in the foreground (the default)
#   with-sshd COMMAND...  sshd in the background and COMMAND: the host that launches
#   COMMAND...            COMMAND alone
# Keys are read from SSH_KEYS (/ssh): authorized_keys, and the private key id_* where a launcher shall run. SSH_PORT (2222)
# is the port of this sshd and of those that ssh logs in to.
set -euo pipefail

keys=${SSH_KEYS:-/ssh}
port=${SSH_PORT:-2222}
state=$HOME/.sshd

say() { printf 'megatron-acco: %s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

warn_of_little_shared_memory() {
    local free
    free=$(df --output=avail --block-size=1M /dev/shm | tail -n 1 | tr -d ' ')
    [ "$free" -ge 1000 ] || say "warning: /dev/shm has $free MiB free, which is little for NCCL, the data loader or" \
        "several ranks on CPUs; start the container with --shm-size 8g (compose: shm_size)"
}

# Copies, since ssh and sshd refuse mounted files with the owner or the rights that they have outside.
copy_key() {
    [ -r "$1" ] || die "cannot read $1 as user $(id -u): build the image with --build-arg USER_ID=$(stat -c %u "$1")"
    install -m 600 "$1" "$HOME/.ssh/${1##*/}"
}

prepare_ssh() {
    local key
    [ -e "$keys/authorized_keys" ] ||
        die "sshd needs the public key of who may log in: mount a folder with authorized_keys at $keys"
    mkdir -p -m 700 "$HOME/.ssh" "$state"
    copy_key "$keys/authorized_keys"
    for key in "$keys"/id_*; do
        [ ! -f "$key" ] || copy_key "$key"
    done
    [ -e "$state/host_key" ] || ssh-keygen -q -t ed25519 -N '' -C "$(hostname)" -f "$state/host_key"
    # The other containers' host keys are as new as this one's: the first login learns them.
    [ -e "$HOME/.ssh/config" ] || printf '%s\n' 'Host *' "    Port $port" '    StrictHostKeyChecking accept-new' \
        '    LogLevel ERROR' >"$HOME/.ssh/config"
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

rm -f "$state/ready"
warn_of_little_shared_memory
case ${1:-} in
    sshd)
        prepare_ssh
        say_ready "$port"
        exec "${sshd[@]}" -e
        ;;
    with-sshd)
        shift
        [ $# -gt 0 ] || die "with-sshd needs a command"
        prepare_ssh
        "${sshd[@]}" -E "$state/log" >/dev/null 2>&1 &
        say_ready "$port"
        for _ in {1..100}; do
            ! bash "$(dirname "${BASH_SOURCE[0]}")/healthcheck.sh" 2>/dev/null || exec "$@"
            sleep 0.1
        done
        die "sshd does not answer on port $port: $(tail -n 3 "$state/log")"
        ;;
    *)
        say_ready "" || say "warning: the health check will fail: cannot write $state"
        exec "$@"
        ;;
esac
