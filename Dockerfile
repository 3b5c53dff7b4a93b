# The service and its worker in one image: the command decides.
FROM python:3.12-slim AS build
WORKDIR /src
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
RUN /venv/bin/pip install --no-cache-dir -c requirements.lock ".[service]"

FROM python:3.12-slim
RUN useradd --system --uid 10001 --home-dir /data --create-home ncr
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 NCR_DATA_DIR=/data NCR_LOG_FORMAT=json
USER ncr
WORKDIR /data
VOLUME /data
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health/ready', timeout=2)"]
# Beyond loopback the service refuses to listen without NCR_ADMIN_KEY.
CMD ["ncr", "serve", "--host", "0.0.0.0", "--port", "8000"]
