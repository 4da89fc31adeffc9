# SPDX-License-Identifier: BSD-3-Clause
# shellcheck shell=bash
# Divide a long build into stages. Each stage is a function. When a stage has finished, a file .done-STAGE marks it. If
# you run the build script again by hand (with build_env.sh), the build continues at the stage that failed. If a run of
# the driver was stopped, the next run continues in the same tree, but with a new $PREFIX. So commands that write to
# $PREFIX must not be in a stage. Put them after the call of run_stages.

# run_stages NAME...: run the functions with these names in this order, except for those that are marked as done.
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

# end_stages: remove the marks. If the run is stopped after this call, the next run starts from the beginning. Call this
# function before files are moved from the tree to $PREFIX, because the next run, with its new $PREFIX, would lack them.
end_stages() {
    rm -f .done-*
}

# If the driver has kept the tree of a stopped run, continue in that tree. The files in the tree were made with the
# packages of the build and host environments. So the tree is used only if both environments have the same packages now.
take_stopped_tree() {
    local stopped="${SRC_DIR%/bld/*}/stopped" environments
    environments=$(find "${PREFIX%/*}" -maxdepth 3 -path '*/conda-meta/*.json' | sort)
    if [[ -d $stopped && $(< "$stopped/.environments") == "$environments" ]]; then
        echo "== continuing where the last run was stopped"
        find . -mindepth 1 -maxdepth 1 ! -name conda_build\* ! -name build_env.sh -exec rm -rf {} +
        # Move the files .done-STAGE last. If this run is stopped before that, its stages run again.
        find "$stopped" -mindepth 1 -maxdepth 1 ! -name conda_build\* ! -name build_env.sh \
            ! -name .done-\* -exec mv -t . {} +
        find "$stopped" -mindepth 1 -maxdepth 1 -name .done-\* -exec mv -t . {} +
    fi
    rm -rf "$stopped"
    echo "$environments" > .environments
}
