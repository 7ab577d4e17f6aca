#!/usr/bin/env bash
# The whole way on data that it makes: images, convert, inspect, train; beside the same training on the image folder
# and on a plain h5py Dataset. Makes its own environment; arguments go to train_demo.py (see --help there).
H5CHUNK_USE_TORCH=1 source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
run() {
    echo
    echo "\$ $*"
    "$@"
}
export PATH="$(dirname "$python"):$PATH"
run python scripts/make_images.py demo-data/train --count 4000 --size 96 96
run python scripts/make_images.py demo-data/test --count 1000 --size 96 96 --seed 1
run h5chunk convert demo-data/train demo-data/train.h5 --overwrite
run h5chunk convert demo-data/test demo-data/test.h5 --overwrite
run h5chunk info demo-data/train.h5
run python scripts/train_demo.py demo-data "$@"
