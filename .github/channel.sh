#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# A channel in this repository's GitHub releases. The release with the tag NAME/SUBDIR has the files of that
# folder, so https://github.com/OWNER/REPOSITORY/releases/download/NAME is the channel's address. The release
# NAME/forge has the list of what was withdrawn and the notes of the builds. There are no shards: their
# folder is too deep for a tag.
#   channel.sh fetch NAME DIR [NOTES]   download what is published
#   channel.sh send NAME DIR NOTES      upload the packages that are not there, then the index
# An interrupted command is run again.
set -euo pipefail
action=$1 name=$2 folder=$3 notes=${4:-}
# in a clone of a fork gh would take the repository that it was forked from
export GH_REPO=${GITHUB_REPOSITORY:?}
# before anything is built: ./forge publish refuses a name without the word, git a tag such as a..b
if [[ $name != *untested* || ! $name =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] ||
    ! git check-ref-format "refs/tags/$name/noarch"; then
    echo "::error::CHANNEL_UNTESTED has to contain 'untested', in lower case, and be the name of a git tag, of" \
        "letters and digits with '.', '_' or '-' in it. It is '$name'" >&2
    exit 2
fi
text="Untested: no package of this channel has run on a gfx1151 GPU. They were built and tested without one, for AMD
Strix Halo. The channel's address for pixi: https://github.com/$GH_REPO/releases/download/$name"

# files PART: the names of a release's files, without halves of an interrupted upload
files() {
    gh release view "$name/$1" --json assets --jq '.assets[] | select(.state == "uploaded").name'
}

# download PART DIR [FILE]: a release's files, or one of them; without names gh would fail at a half
download() {
    local names file patterns=()
    names=$(files "$1")
    while read -r file; do
        [[ -z $file || ${3:-$file} != "$file" ]] || patterns+=(--pattern "$file")
    done <<<"$names"
    [[ ${#patterns[@]} = 0 ]] || gh release download "$name/$1" --clobber --dir "$2" "${patterns[@]}"
}

fetch() {
    local releases part
    releases=$(gh release list --limit 1000 --json tagName --jq '.[].tagName')
    mkdir -p "$folder"
    for part in linux-64 noarch forge; do
        grep -qxF "$name/$part" <<<"$releases" || continue
        case $part in
            forge)
                download forge "$folder" withdrawn.json
                [[ -z $notes ]] || download forge "$notes"
                ;;
            *) download "$part" "$folder/$part" ;;
        esac
    done
    # nothing is built with what was withdrawn
    [[ ! -e $folder/withdrawn.json ]] || { grep -o '"file": "[^"]*' "$folder/withdrawn.json" || :; } |
        cut -d'"' -f4 | while read -r part; do rm -f "$folder/$part"; done
}

# send_missing PART FILE...: what is published never changes
send_missing() {
    local part=$1 present file missing=()
    shift
    present=$(files "$part")
    for file; do
        grep -qxF "${file##*/}" <<<"$present" || missing+=("$file")
    done
    [[ ${#missing[@]} = 0 ]] || gh release upload "$name/$part" --clobber "${missing[@]}"
}

send() {
    local releases part
    shopt -s nullglob
    releases=$(gh release list --limit 1000 --json tagName --jq '.[].tagName')
    for part in forge linux-64 noarch; do
        grep -qxF "$name/$part" <<<"$releases" ||
            gh release create "$name/$part" --prerelease --title "$name: $part" --notes "$text"
    done
    # first, because publish takes no folder without it
    send_missing forge "$folder/withdrawn.json"
    gh release download "$name/forge" --pattern withdrawn.json --output - | cmp -s - "$folder/withdrawn.json" ||
        gh release upload "$name/forge" --clobber "$folder/withdrawn.json"
    send_missing forge "$notes"/*.json
    for part in linux-64 noarch; do
        send_missing "$part" "$folder/$part"/*.conda
    done
    for part in linux-64 noarch; do
        gh release upload "$name/$part" --clobber "$folder/$part"/repodata{_from_packages.json,.json,.json.zst}
    done
}

"$action"
