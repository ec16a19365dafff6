//! Traces of the node: the tracer and its exporter, if `--otlp-endpoint` is set.

use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Time that a stopping server leaves to the last export.
const STOP_WAIT_MAX: Duration = Duration::from_secs(2);

/// The task that exports traces.
#[derive(Debug)]
pub(super) struct TraceExport {
    task: JoinHandle<()>,
    stop: CancellationToken,
}

impl TraceExport {
    /// Exports the traces that are left. Waits for a moment only.
    pub(super) async fn stop(self) {
        self.stop.cancel();
        // Ignored: traces of a collector that does not answer are lost.
        let _ = tokio::time::timeout(STOP_WAIT_MAX, self.task).await;
    }
}

/// Starts to trace batches, if the settings name a collector.
#[cfg(feature = "otlp")]
pub(super) fn start(config: &TraceConfig, node: &crate::node::Node) -> Option<TraceExport> {
    use std::sync::Arc;

    use crate::random::Random;
    use crate::trace::{OtlpExporter, OtlpSettings, Tracer};

    let endpoint = config.endpoint.clone()?;
    let info = node.info();
    let settings = OtlpSettings { endpoint, node_id: info.node_id, cluster_id: info.cluster_id };
    let clock = Arc::new(crate::clock::SystemClock);
    let random = || Random::new(None);
    let (tracer, traces) = Tracer::new(config.share, clock, random());
    match OtlpExporter::new(&settings, traces, tracer.counts().clone(), random()) {
        Ok(exporter) => {
            node.set_tracer(Arc::new(tracer));
            let stop = CancellationToken::new();
            let task = tokio::spawn(exporter.run(stop.clone()));
            Some(TraceExport { task, stop })
        }
        Err(error) => {
            tracing::error!(endpoint = settings.endpoint, error, "not exporting traces");
            None
        }
    }
}

/// The configuration was checked: without the feature it names no collector.
#[cfg(not(feature = "otlp"))]
pub(super) fn start(_: &TraceConfig, _: &crate::node::Node) -> Option<TraceExport> {
    None
}

/// Settings of traces.
#[derive(Debug, Default)]
#[cfg_attr(not(feature = "otlp"), expect(dead_code))]
pub(super) struct TraceConfig {
    pub(super) endpoint: Option<String>,
    pub(super) share: f64,
}
