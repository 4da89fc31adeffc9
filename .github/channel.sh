#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Keep a channel in this repository's GitHub releases. The release with the tag NAME/SUBDIR has the files of that
# subdir, so https://github.com/OWNER/REPOSITORY/releases/download/NAME is the channel's address. The release
# NAME/forge has the list of withdrawn packages and the notes on the builds. The channel has no shards, because they
# would have to be in a folder inside the subdir, and a release has no folders.
#   channel.sh fetch NAME DIR [NOTES]   download the published files
#   channel.sh send NAME DIR NOTES      upload the missing packages, then the index
# After an interruption, run the command again.
set -euo pipefail
action=$1 name=$2 folder=$3 notes=${4:-}
# Without GH_REPO, gh in a clone of a fork would use the repository that was forked.
export GH_REPO=${GITHUB_REPOSITORY:?}
# Check the channel's name before anything is built. Otherwise the builds would run first, and then ./forge publish
# would refuse a name without the word `untested`, or git would refuse a tag such as a..b.
if [[ $name != *untested* || ! $name =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] ||
    ! git check-ref-format "refs/tags/$name/noarch"; then
    echo "::error::CHANNEL_UNTESTED has to contain 'untested', in lower case. It has to be valid as a git tag," \
        "consist of letters, digits, '.', '_' and '-', and begin with a letter or digit. It is '$name'" >&2
    exit 2
fi
text="Untested: no package of this channel has run on a gfx1151 GPU. They were built and tested without one, for AMD
Strix Halo. The channel's address for pixi: https://github.com/$GH_REPO/releases/download/$name"

# files PART: print the names of the files in the release NAME/PART, except for files whose upload was interrupted
files() {
    gh release view "$name/$1" --json assets --jq '.assets[] | select(.state == "uploaded").name'
}

# download PART DIR [FILE]: download the files of the release NAME/PART, or only FILE. The files are named explicitly,
# because gh fails at a file whose upload was interrupted.
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
    # Remove withdrawn packages from the folder, so that nothing is built with them.
    [[ ! -e $folder/withdrawn.json ]] || { grep -o '"file": "[^"]*' "$folder/withdrawn.json" || :; } |
        cut -d'"' -f4 | while read -r part; do rm -f "$folder/$part"; done
}

# send_missing PART FILE...: upload each FILE, a package or withdrawn.json, that the release NAME/PART lacks. The notes
# on the missing packages are uploaded first, to the release NAME/forge. A file that the release has is not uploaded
# again: a published package never changes, and `send` itself replaces an outdated withdrawn.json. A note replaces an
# older note of the same name. The older note is from a run that was interrupted before it uploaded the package, so it
# describes a file that was never published.
send_missing() {
    local part=$1 present file note missing=() missing_notes=()
    shift
    present=$(files "$part")
    for file; do
        grep -qxF "${file##*/}" <<<"$present" && continue
        missing+=("$file")
        note=$notes/$(basename "$file" .conda).json
        [[ ! -e $note ]] || missing_notes+=("$note")
    done
    [[ ${#missing_notes[@]} = 0 ]] || gh release upload "$name/forge" --clobber "${missing_notes[@]}"
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
    # Send withdrawn.json first, because `./forge publish` refuses a folder without this file.
    send_missing forge "$folder/withdrawn.json"
    gh release download "$name/forge" --pattern withdrawn.json --output - | cmp -s - "$folder/withdrawn.json" ||
        gh release upload "$name/forge" --clobber "$folder/withdrawn.json"
    for part in linux-64 noarch; do
        send_missing "$part" "$folder/$part"/*.conda
    done
    for part in linux-64 noarch; do
        gh release upload "$name/$part" --clobber "$folder/$part"/repodata{_from_packages.json,.json,.json.zst}
    done
}

"$action"
