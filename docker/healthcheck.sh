#!/usr/bin/env bash
# Healthy: entrypoint.sh has finished its set-up, and the sshd that it was asked for, if any, greets.
set -euo pipefail
port=$(<"$HOME/.sshd/ready")
[ -n "$port" ] || exit 0
exec 3<>"/dev/tcp/127.0.0.1/$port"
read -r -t 4 greeting <&3
[[ $greeting == SSH-2.0-* ]]
