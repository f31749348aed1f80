# Images: stages base -> cpu, chosen by --target. The image holds dependencies; the code is copied last.
#   docker build --target cpu -t trainyard:cpu .
#   docker run --rm -v "$PWD/runs:/workspace/runs" -v "$PWD/data:/workspace/data" trainyard:cpu run fingerprint_demo
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS base
ENV PYTHONUNBUFFERED=1 PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

FROM base AS cpu
COPY containers/dev.lock /opt/trainyard/containers/dev.lock
RUN pip install --no-cache-dir --require-hashes -r /opt/trainyard/containers/dev.lock
COPY pyproject.toml README.md LICENSE /opt/trainyard/
COPY src /opt/trainyard/src
COPY jobs /opt/trainyard/jobs
RUN pip install --no-cache-dir --no-deps --no-build-isolation --editable /opt/trainyard
USER 10001:10001
WORKDIR /workspace
ENTRYPOINT ["trainyard"]
