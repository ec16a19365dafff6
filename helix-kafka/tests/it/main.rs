//! Tests of the gateway over its port. `tests/clients.sh` runs Kafka's clients against a cluster.

#![allow(clippy::unwrap_used)]

mod hostile;
mod probes;
