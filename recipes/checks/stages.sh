# SPDX-License-Identifier: BSD-3-Clause
# shellcheck shell=bash
# Stages of a build of hours, each a function that is marked when done. Run again by hand
# (build_env.sh), a script resumes at the stage that failed. A run that was stopped goes on with the tree,
# but with a new $PREFIX: what fills it is no stage and comes after them.

# run_stages NAME...: run the functions of these names that are not marked, in this order.
run_stages() {
    local stage
    take_stopped_tree
    for stage; do
        [[ -e .done-$stage ]] && continue
        echo "== $stage"
        "$stage"
        touch ".done-$stage"
    done
}

# end_stages: a run that is stopped from here on begins anew. $PREFIX has then what the tree no longer has.
end_stages() {
    rm -f .done-*
}

# Go on in the tree of the same build, which the driver keeps of a run that was stopped. It holds paths of
# both environments, and objects that were made with what is in them: these have to be the same.
take_stopped_tree() {
    local stopped="${SRC_DIR%/bld/*}/stopped" environments
    environments=$(find "${PREFIX%/*}" -maxdepth 3 -path '*/conda-meta/*.json' | sort)
    if [[ -d $stopped && $(< "$stopped/.environments") == "$environments" ]]; then
        echo "== going on where the last run was stopped"
        find . -mindepth 1 -maxdepth 1 ! -name conda_build\* ! -name build_env.sh -exec rm -rf {} +
        # the marks go last: this may be stopped too
        find "$stopped" -mindepth 1 -maxdepth 1 ! -name conda_build\* ! -name build_env.sh \
            ! -name .done-\* -exec mv -t . {} +
        find "$stopped" -mindepth 1 -maxdepth 1 -name .done-\* -exec mv -t . {} +
    fi
    rm -rf "$stopped"
    echo "$environments" > .environments
}
