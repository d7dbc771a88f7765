#!/bin/sh
# Installs nginx with its Lua module from the distribution (Debian, Ubuntu); does nothing when it is there.
set -eu

LUA_MODULE=/usr/lib/nginx/modules/ngx_http_lua_module.so

if command -v nginx >/dev/null 2>&1 && [ -e "$LUA_MODULE" ]; then
    exit 0
fi
if ! command -v apt-get >/dev/null 2>&1; then
    echo "install nginx with lua-nginx-module (or OpenResty): this system has no apt-get" >&2
    exit 1
fi
sudo=""
if [ "$(id -u)" -ne 0 ]; then
    sudo=sudo
fi
# The lists of a fresh image are empty or old.
$sudo apt-get update -qq
$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    nginx libnginx-mod-http-lua
