# Container images, one per kind of GPU: base -> cpu | cuda12-pascal | cuda12 | cuda13 (see containers/README.md).
#   docker build --target cuda13 -t localhost/trainyard:cuda13 .    or: make image HW=a100, which adds labels of commit and lock
# Works with Docker (BuildKit) and podman alike, hence no syntax line, heredoc, COPY --link, SHELL or HEALTHCHECK.
# Debian 12 of 18 September 2026. Digests: https://github.com/docker-library/repo-info/tree/master/repos/debian/remote
ARG BASE_IMAGE=docker.io/library/debian:bookworm-20260918-slim@sha256:3783cc01769c7b2b1b83a5c5ad96c815348e28ed7da68e2e3687004faa906251
# What the stage `tests` adds the tests' tools to
ARG TESTED=localhost/trainyard:cpu

# Wheels for a build without network: --build-context wheelhouse=FOLDER
FROM scratch AS wheelhouse

FROM ${BASE_IMAGE} AS base
COPY containers/debian.txt /opt/trainyard/containers/
# Our own base has these packages already and needs no network. The base's digest pins their versions.
# hadolint ignore=DL3008
RUN set -eu; wanted=/opt/trainyard/containers/debian.txt; \
    if ! xargs dpkg-query --show < "$wanted" > /dev/null; then \
        apt-get update; \
        DEBIAN_FRONTEND=noninteractive xargs apt-get install --yes --no-install-recommends < "$wanted"; \
        rm -rf /var/lib/apt/lists/* /var/log/apt /var/log/dpkg.log /var/cache/ldconfig/aux-cache; \
    fi; \
    groupadd --gid 10001 trainyard; \
    useradd --uid 10001 --gid 10001 --no-log-init --no-create-home --home-dir /tmp trainyard; \
    mkdir -p /workspace; chown 10001:10001 /workspace
# HOME and USER: caches work under any user id. PYTHONPATH stays unset: a run sets it.
# OMP_WAIT_POLICY: waiting OpenMP threads do not spin on cores that others need (src/trainyard/hardware.py).
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    LANG=C.UTF-8 HOME=/tmp USER=trainyard OMP_WAIT_POLICY=passive \
    PYTHONUNBUFFERED=1 PYTHONNOUSERSITE=1 PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /workspace
# tini: process 1 ignores SIGTERM until it installs a handler
ENTRYPOINT ["tini", "--", "trainyard"]
LABEL org.opencontainers.image.title=trainyard org.opencontainers.image.licenses=Apache-2.0

FROM base AS code
COPY pyproject.toml README.md LICENSE /opt/trainyard/
COPY src /opt/trainyard/src
COPY jobs /opt/trainyard/jobs
RUN python3 -m compileall -q -f --invalidation-mode unchecked-hash /opt/trainyard

# Each lock in two parts, torch with NVIDIA's libraries and the rest, so that a change of one leaves the other's layer alone.
# Stages copy them, because podman's layer cache does not notice changes inside a mount.
FROM base AS locks
WORKDIR /locks
COPY containers/*.lock ./
RUN set -eu; for lock in *.lock; do mkdir "${lock%.lock}"; awk -v folder="${lock%.lock}" ' \
        /^[a-z]/ { part = /^(torch|torchvision|triton|cuda-.*|nvidia-.*)==/ ? "torch" : "rest" } \
        !/^ *#/ { print > (folder "/" part ".lock") }' "$lock"; done

FROM base AS cpu
ARG TORCH_INDEX=""
COPY containers/install containers/cpu-torch.txt containers/cpu-left-out.txt /opt/trainyard/containers/
COPY --from=locks /locks/cpu/torch.lock /opt/trainyard/containers/
RUN --mount=type=bind,from=wheelhouse,target=/run/wheelhouse \
    --mount=type=secret,id=cacert,target=/run/secrets/cacert --mount=type=secret,id=pipconf,target=/etc/pip.conf \
    /opt/trainyard/containers/install torch
COPY containers/sbom.py /opt/trainyard/containers/
COPY --from=locks /locks/cpu/rest.lock /opt/trainyard/containers/
RUN --mount=type=bind,from=wheelhouse,target=/run/wheelhouse \
    --mount=type=secret,id=cacert,target=/run/secrets/cacert --mount=type=secret,id=pipconf,target=/etc/pip.conf \
    /opt/trainyard/containers/install rest
COPY --from=code /opt/trainyard /opt/trainyard
ENV TRAINYARD_TARGET=cpu
LABEL io.trainyard.target=cpu io.trainyard.torch=2.13.0
USER 10001:10001

FROM base AS cuda12-pascal
COPY containers/install /opt/trainyard/containers/
COPY --from=locks /locks/cuda12-pascal/torch.lock /opt/trainyard/containers/
RUN --mount=type=bind,from=wheelhouse,target=/run/wheelhouse \
    --mount=type=secret,id=cacert,target=/run/secrets/cacert --mount=type=secret,id=pipconf,target=/etc/pip.conf \
    /opt/trainyard/containers/install torch
COPY containers/sbom.py /opt/trainyard/containers/
COPY --from=locks /locks/cuda12-pascal/rest.lock /opt/trainyard/containers/
RUN --mount=type=bind,from=wheelhouse,target=/run/wheelhouse \
    --mount=type=secret,id=cacert,target=/run/secrets/cacert --mount=type=secret,id=pipconf,target=/etc/pip.conf \
    /opt/trainyard/containers/install rest
COPY --from=code /opt/trainyard /opt/trainyard
ENV TRAINYARD_TARGET=cuda12-pascal TRAINYARD_MIN_DRIVER=525.60.13 TRAINYARD_MAX_DRIVER=580 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility,video \
    NVIDIA_REQUIRE_CUDA="driver>=525.60.13,driver<581"
LABEL io.trainyard.target=cuda12-pascal io.trainyard.torch=2.7.1 io.trainyard.sm="50 60 70 75 80 86 90" \
    io.trainyard.min-driver=525.60.13 io.trainyard.max-driver=580
USER 10001:10001

FROM base AS cuda12
COPY containers/install /opt/trainyard/containers/
COPY --from=locks /locks/cuda12/torch.lock /opt/trainyard/containers/
RUN --mount=type=bind,from=wheelhouse,target=/run/wheelhouse \
    --mount=type=secret,id=cacert,target=/run/secrets/cacert --mount=type=secret,id=pipconf,target=/etc/pip.conf \
    /opt/trainyard/containers/install torch
COPY containers/sbom.py /opt/trainyard/containers/
COPY --from=locks /locks/cuda12/rest.lock /opt/trainyard/containers/
RUN --mount=type=bind,from=wheelhouse,target=/run/wheelhouse \
    --mount=type=secret,id=cacert,target=/run/secrets/cacert --mount=type=secret,id=pipconf,target=/etc/pip.conf \
    /opt/trainyard/containers/install rest
COPY --from=code /opt/trainyard /opt/trainyard
ENV TRAINYARD_TARGET=cuda12 TRAINYARD_MIN_DRIVER=525.60.13 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility,video \
    NVIDIA_REQUIRE_CUDA="driver>=525.60.13"
LABEL io.trainyard.target=cuda12 io.trainyard.torch=2.10.0 io.trainyard.sm="70 75 80 86 90 100 120" \
    io.trainyard.min-driver=525.60.13
USER 10001:10001

FROM base AS cuda13
COPY containers/install /opt/trainyard/containers/
COPY --from=locks /locks/cuda13/torch.lock /opt/trainyard/containers/
RUN --mount=type=bind,from=wheelhouse,target=/run/wheelhouse \
    --mount=type=secret,id=cacert,target=/run/secrets/cacert --mount=type=secret,id=pipconf,target=/etc/pip.conf \
    /opt/trainyard/containers/install torch
COPY containers/sbom.py /opt/trainyard/containers/
COPY --from=locks /locks/cuda13/rest.lock /opt/trainyard/containers/
RUN --mount=type=bind,from=wheelhouse,target=/run/wheelhouse \
    --mount=type=secret,id=cacert,target=/run/secrets/cacert --mount=type=secret,id=pipconf,target=/etc/pip.conf \
    /opt/trainyard/containers/install rest
COPY --from=code /opt/trainyard /opt/trainyard
ENV TRAINYARD_TARGET=cuda13 TRAINYARD_MIN_DRIVER=580.65.06 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility,video \
    NVIDIA_REQUIRE_CUDA="driver>=580.65.06"
LABEL io.trainyard.target=cuda13 io.trainyard.torch=2.13.0 io.trainyard.sm="75 80 86 90 100 120" \
    io.trainyard.min-driver=580.65.06
USER 10001:10001

# The tests' tools on one of the images above, which have none: make test-image builds and runs it
# hadolint ignore=DL3006
FROM ${TESTED} AS tests
USER 0:0
COPY containers/tests.lock /opt/trainyard/containers/
RUN --mount=type=bind,from=wheelhouse,target=/run/wheelhouse \
    --mount=type=secret,id=cacert,target=/run/secrets/cacert --mount=type=secret,id=pipconf,target=/etc/pip.conf \
    /opt/trainyard/containers/install tests
USER 10001:10001
