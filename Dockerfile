# DenseFeed for NVIDIA GPUs, from the checkout; docs/start/install.md says how to run it.
FROM nvidia/cuda:13.0.2-base-ubuntu24.04

# git is for the version. gcc and Python's headers are also for Triton, which builds what starts its
# kernels.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        ca-certificates gcc git libc6-dev libjpeg-turbo8-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/densefeed/bin:$PATH
# PyTorch's own CUDA libraries need nothing of the system but its driver.
# hadolint ignore=DL3013
RUN python3 -m venv /opt/densefeed \
    && pip install --no-cache-dir torch torchvision timm
# hadolint ignore=DL3013
RUN --mount=type=bind,target=/checkout,rw \
    pip install --no-cache-dir "/checkout[cloud,demo,export,parquet]"

# Caches are found for any number of `docker run --user`, which has no home and no name.
ENV HOME=/tmp USER=densefeed
USER 1000:1000
WORKDIR /work
CMD ["densefeed"]
