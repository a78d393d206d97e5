# An image with the command `torchtitan-dit`, for processors:
#     docker build -t torchtitan-dit .
# and for NVIDIA GPUs, on an image that brings torch 2.11 to 2.14:
#     docker build --build-arg BASE=pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime -t torchtitan-dit .
# To train on pictures of this machine, with runs in ./outputs:
#     docker run --gpus all --shm-size 8g -v "$PWD":/work torchtitan-dit train digits
ARG BASE=python:3.12-slim
FROM ${BASE}

# A compiler, for torch.compile; git, for hub datasets that ask for it.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*

# Options of pip, such as the index that has torch's build for processors only, which is a tenth of the size.
ARG TORCH_OPTIONS=""
RUN python -c "import torch" 2>/dev/null \
    || python -m pip install --no-cache-dir ${TORCH_OPTIONS} torch==2.13.0

COPY pyproject.toml README.md LICENSE /source/
COPY data /source/data
COPY torchtitan /source/torchtitan
COPY torchtitan_dit /source/torchtitan_dit
COPY train_configs /source/train_configs

# digits: the dataset of the first configuration. More, with commas: --build-arg EXTRAS=digits,hub,wandb
ARG EXTRAS=digits
RUN python -m pip install --no-cache-dir "/source[${EXTRAS}]" && rm -rf /source

WORKDIR /work
ENTRYPOINT ["torchtitan-dit"]
CMD ["--help"]
