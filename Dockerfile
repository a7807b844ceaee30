# The README's commands in a container:
#
#     docker build -t minigen .
#     docker run --rm -it minigen                 # make demo
#     docker run --rm -it minigen make test
#
# Without TORCH_INDEX, the version of torch is that of constraints.txt. pip's torch for Linux includes CUDA, which takes several
# GB. For PyTorch's CPU build, pass the index address that pytorch.org shows (Compute Platform: CPU):
# docker build --build-arg TORCH_INDEX=ADDRESS -t minigen .

ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS tools
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git make \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --shell /bin/bash learner \
    && install --directory --owner=learner --group=learner /opt/minigen
ARG TORCH_INDEX=
ENV TORCH_INDEX=${TORCH_INDEX}
USER learner

FROM tools
WORKDIR /opt/minigen
COPY --chown=learner:learner . .
RUN make setup && .venv/bin/python -m minigen pull
CMD ["make", "demo"]
