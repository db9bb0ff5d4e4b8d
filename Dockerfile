# Drover with all that runs need.
#
#   docker build --tag drover .                                   torch as pip has it for Linux: with CUDA
#   docker build --tag drover:cpu --build-arg TORCH_INDEX=URL .   torch from another index, such as PyTorch's of CPU builds
#   docker run --gpus all --volume "$PWD:/work" drover \
#       drover run /opt/drover/configs/demo.yaml --cluster local
ARG PYTHON=3.12
FROM python:${PYTHON}-slim
ARG TORCH_INDEX=
ARG EXTRAS=all,clean,eval,objects,web

# torch.compile builds with a C++ compiler.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/drover
COPY constraints.txt ./
RUN if [ -n "$TORCH_INDEX" ]; then \
      pip install --no-cache-dir --constraint constraints.txt --extra-index-url "$TORCH_INDEX" torch; \
    fi
COPY pyproject.toml README.md LICENSE ./
COPY drover drover
COPY model model
COPY pipeline pipeline
COPY launch launch
COPY tools tools
COPY configs configs
RUN pip install --no-cache-dir --constraint constraints.txt --editable ".[${EXTRAS}]"

WORKDIR /work
