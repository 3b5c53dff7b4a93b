# The service and its worker in one image: the command decides.
FROM python:3.12-slim AS build
WORKDIR /src
# More libraries, by the names of pyproject.toml: --build-arg EXTRAS=s3,otel,faiss
ARG EXTRAS=""
# The CPU build of torch; for GPUs build with --build-arg TORCH_INDEX=https://pypi.org/simple
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY requirements.lock ./
RUN python -m venv /venv \
 && /venv/bin/pip install --no-cache-dir --index-url "$TORCH_INDEX" \
      "$(grep '^torch==' requirements.lock)"
COPY pyproject.toml README.md LICENSE ./
COPY ncr_core ncr_core
COPY app app
COPY migrations migrations
RUN /venv/bin/pip install --no-cache-dir -c requirements.lock ".[service${EXTRAS:+,$EXTRAS}]"

FROM python:3.12-slim
# Triton compiles kernels for GPUs with the C compiler of the machine.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN case "$TORCH_INDEX" in \
      */cpu) ;; \
      *) apt-get update \
         && apt-get install -y --no-install-recommends gcc libc6-dev \
         && rm -rf /var/lib/apt/lists/* ;; \
    esac
RUN useradd --system --uid 10001 --home-dir /data --create-home ncr \
 && install -d -o ncr -g ncr /var/cache/ncr
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 NCR_DATA_DIR=/data NCR_LOG_FORMAT=json \
    NCR_WORKER_ALIVE_FILE=/tmp/ncr-worker NUMBA_CACHE_DIR=/var/cache/ncr TRITON_CACHE_DIR=/var/cache/ncr/triton \
    SQLITE_TMPDIR=/data
USER ncr
WORKDIR /data
# Compiled here, so that a start does not: a processor of another kind than this one compiles again.
RUN python -c "from ncr_core.optional_imports import numba_kernel as kernel; \
    assert kernel('ncr_core.fold_in.numba_kernel'); \
    assert kernel('ncr_core.ranking.backends.numba_kernel'); \
    assert kernel('ncr_core.ranking.backends.additive_kernel')"
VOLUME /data
# A volume of each container's own, filled with what was compiled; writable where the root is not.
VOLUME /var/cache/ncr
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health/ready', timeout=2)"]
# Beyond loopback the service refuses to listen without NCR_ADMIN_KEY. There is no worker in it:
# run `ncr worker` beside it, or add --with-worker.
CMD ["ncr", "serve", "--host", "0.0.0.0", "--port", "8000"]
