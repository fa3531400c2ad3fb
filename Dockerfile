# Sfumato for the CPU: docker build -t sfumato . && docker run --rm sfumato demo
#
#   mkdir -p kept
#   docker run --rm --network none --user "$(id -u):$(id -g)" -v "$PWD/xrays:/data:ro" -v "$PWD/kept:/kept" sfumato train /data --epsilon 3
#
# /kept holds runs/ and the ledger: mount a folder of yours, or both are gone with the container; --user writes them as you.
# The public weights are inside, so that no network is needed. The compiler stays in the first stage.
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN python -m venv /opt/sfumato \
 && /opt/sfumato/bin/pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
    "/source[pretrained,medical,serve,export]"

FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home sfumato && mkdir /kept && chown sfumato /kept
COPY --from=build /opt/sfumato /opt/sfumato
ENV PATH=/opt/sfumato/bin:$PATH HOME=/kept SFUMATO_LEDGER=/kept/ledger.sqlite SFUMATO_CACHE=/kept/cache
USER sfumato
WORKDIR /kept
ENTRYPOINT ["sfumato"]
CMD ["--help"]
