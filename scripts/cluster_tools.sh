# Sourced by run_tests.sh, after venv.sh: the tools of the cluster in a box (benchmarks/cluster.py), where this is root
# on Debian or Ubuntu. Never fails: without them the tests that need a cluster are skipped and say why.

ensure_cluster_tools() {
    local tool policy=/usr/sbin/policy-rc.d made_policy=
    local -a packages=()
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 0
    for tool in ip:iproute2 tc:iproute2 sshd:openssh-server ssh:openssh-client pdsh:pdsh nsenter:util-linux buildah:buildah mmdebstrap:mmdebstrap; do
        PATH=$PATH:/usr/sbin:/sbin command -v "${tool%%:*}" >/dev/null || packages+=("${tool#*:}")
    done
    [ ${#packages[@]} -gt 0 ] || return 0
    say "installing for tests on several hosts: ${packages[*]}"
    # The cluster starts its own sshd inside its hosts; this machine shall not become reachable by it.
    if [ ! -e $policy ] && printf '#!/bin/sh\nexit 101\n' >$policy 2>/dev/null; then
        made_policy=yes
        chmod +x $policy
    fi
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}"; } \
        >/dev/null 2>&1 || say "apt-get could not install ${packages[*]}; tests on several hosts will be skipped"
    if [ -n "$made_policy" ]; then
        rm -f $policy
        case " ${packages[*]} " in *" openssh-server "*)
            ! command -v systemctl >/dev/null || systemctl disable ssh sshd ssh.socket >/dev/null 2>&1 || true ;;
        esac
    fi
    return 0
}
