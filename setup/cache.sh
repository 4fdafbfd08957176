# Read by the scripts beside it: how things are fetched into the cache that all clones share.
#
# BONFIRE_CACHE=DIR moves it (default: ~/.cache/bonfire).
[ -n "${BONFIRE_CACHE:-}${HOME:-}" ] ||
  { echo "HOME is not set: set it, or BONFIRE_CACHE to the folder into which things are fetched" >&2; exit 2; }
cache=${BONFIRE_CACHE:-$HOME/.cache/bonfire}
# On a terminal pip shows how far it is.
quiet=(--quiet)
[ ! -t 2 ] || quiet=()
fetch() {
  python3 -m pip download "${quiet[@]}" --disable-pip-version-check --no-deps --only-binary=:all: --dest "$part" --python-version 312 "$@" >&2
}
# Clones that start together fetch once: the others wait, and then find it complete.
lock() {
  mkdir -p "$cache"
  exec 9> "$cache/lock"
  flock --nonblock 9 || { echo "waiting for another process that fetches into $cache" >&2; flock 9; }
}
# Things are unpacked beside their final place and renamed, so a clone never sees half of them.
begin_part() {
  part=$(mktemp -d "$cache/part.XXXXXX")
  trap 'rm -rf "$part"' EXIT
}
unpack() { mkdir "$part/wheels" && for wheel in "$part"/*.whl; do unzip -qo "$wheel" -d "$part/wheels"; done; }
