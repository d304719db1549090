# Sourced by run_tests.sh, after venv.sh: Chromium, for the test that opens a report, where this is root on Debian or
# Ubuntu. Never fails: without it that test is skipped and says why.

ensure_browser() {
    local name
    for name in chromium chromium-browser google-chrome; do
        command -v $name >/dev/null && return 0
    done
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 0
    say "installing chromium for the test that opens a report"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } \
        >/dev/null 2>&1 || say "apt-get could not install chromium; that test will be skipped"
    return 0
}
