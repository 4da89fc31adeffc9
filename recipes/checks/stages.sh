# SPDX-License-Identifier: BSD-3-Clause
# shellcheck shell=bash
# Divide a long build into stages. Each stage is a function, and a file marks it when it is done. If you run the
# script again by hand (build_env.sh), it continues at the stage that failed. If a run was stopped, the next run
# continues in the same tree, but with a new $PREFIX. So commands that write to $PREFIX must not be in a stage, but
# follow after the stages.

# run_stages NAME...: run those of these functions that are not marked as done, in this order.
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

# end_stages: if the run is stopped after this call, the next run starts from the beginning. Call it before files are
# moved from the tree to $PREFIX, since the next run does not have them.
end_stages() {
    rm -f .done-*
}

# If the driver has kept the tree of a stopped run, continue in that tree. Its files contain paths of the build and
# host environments, and were made with their packages. So this is done only if the packages are the same.
take_stopped_tree() {
    local stopped="${SRC_DIR%/bld/*}/stopped" environments
    environments=$(find "${PREFIX%/*}" -maxdepth 3 -path '*/conda-meta/*.json' | sort)
    if [[ -d $stopped && $(< "$stopped/.environments") == "$environments" ]]; then
        echo "== continuing where the last run was stopped"
        find . -mindepth 1 -maxdepth 1 ! -name conda_build\* ! -name build_env.sh -exec rm -rf {} +
        # Move the marks last, because this run may be stopped here too.
        find "$stopped" -mindepth 1 -maxdepth 1 ! -name conda_build\* ! -name build_env.sh \
            ! -name .done-\* -exec mv -t . {} +
        find "$stopped" -mindepth 1 -maxdepth 1 -name .done-\* -exec mv -t . {} +
    fi
    rm -rf "$stopped"
    echo "$environments" > .environments
}
