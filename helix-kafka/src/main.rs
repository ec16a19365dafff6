//! The program `helix-kafka`.

use std::io::{self, IsTerminal};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Parser;
use helix_client::{Config, TlsOptions, TokenSource};
use helix_kafka::{
    Gateway, GatewayError, GatewayLimits, GatewayOfNode, GatewayOptions, GatewayRules, HostPort,
};
use helix_tls::CertificateFiles;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

#[global_allocator]
static ALLOCATOR: helix_allocator::Allocator = helix_allocator::Allocator;

/// Serve Kafka's protocol from a Helix cluster
///
/// One gateway runs beside each node. Clients of Kafka take the gateways for brokers.
#[derive(Debug, Parser)]
#[command(name = "helix-kafka", version, max_term_width = 100)]
struct Arguments {
    /// Address to listen on
    #[arg(long, env = "HELIX_KAFKA_LISTEN_ADDR", default_value = "127.0.0.1:9292")]
    listen_addr: SocketAddr,

    /// Address of probes and metrics, or off [default: 127.0.0.1 and the port plus 552]
    #[arg(long, env = "HELIX_KAFKA_METRICS_ADDR", value_parser = metrics_addr)]
    metrics_addr: Option<MetricsAddr>,

    /// Address that clients dial, HOST:PORT [default: the one listened on]
    #[arg(long, env = "HELIX_KAFKA_ADVERTISED_ADDR")]
    advertised_addr: Option<HostPort>,

    /// Gateways beside the nodes, this one included: NODE=HOST:PORT,... [default: only this one]
    #[arg(long, env = "HELIX_KAFKA_GATEWAYS", value_delimiter = ',')]
    gateways: Vec<GatewayOfNode>,

    /// Addresses of Helix nodes, HOST:PORT,...
    #[arg(long, env = "HELIX_ADDR", value_delimiter = ',', default_value = "127.0.0.1:9092")]
    addr: Vec<String>,

    /// CAs of the nodes' certificates, PEM
    #[arg(long, env = "HELIX_CA")]
    ca: Vec<PathBuf>,

    /// Certificate of the gateway as a client of the nodes, PEM
    #[arg(long, env = "HELIX_CERT", requires = "key")]
    cert: Option<PathBuf>,

    /// Private key of --cert, PEM
    #[arg(long, env = "HELIX_KEY", requires = "cert")]
    key: Option<PathBuf>,

    /// Certificate that Kafka's clients see, PEM
    #[arg(long, env = "HELIX_KAFKA_TLS_CERT", requires = "tls_key")]
    tls_cert: Option<PathBuf>,

    /// Private key of --tls-cert, PEM
    #[arg(long, env = "HELIX_KAFKA_TLS_KEY", requires = "tls_cert")]
    tls_key: Option<PathBuf>,

    /// Require a login: PLAIN with a token as password, or OAUTHBEARER with a JWT
    #[arg(long, env = "HELIX_KAFKA_SASL")]
    sasl: bool,

    /// Accept logins on connections without TLS from other machines
    #[arg(long, env = "HELIX_KAFKA_INSECURE")]
    insecure: bool,

    /// Create topics with this many partitions when clients ask for them [default: create none]
    #[arg(long, env = "HELIX_KAFKA_AUTO_CREATE_PARTITIONS")]
    auto_create_partitions: Option<u32>,

    /// Memory for requests and responses, in MiB
    #[arg(long, env = "HELIX_KAFKA_MEMORY_MIB", default_value_t = 256)]
    memory_mib: usize,

    /// Most open connections
    #[arg(long, env = "HELIX_KAFKA_CONNECTIONS", default_value_t = 10_000)]
    connections: usize,

    /// Largest request, in MiB
    #[arg(long, env = "HELIX_KAFKA_REQUEST_MIB", default_value_t = 16)]
    request_mib: usize,

    /// Close connections without a request for this many seconds
    #[arg(long, env = "HELIX_KAFKA_IDLE_SECONDS", default_value_t = 600)]
    idle_seconds: u64,

    /// Stop when standard input closes, so that the gateway ends with its parent process
    #[arg(long, hide = true)]
    exit_with_stdin: bool,
}

/// Address of the port for probes and metrics.
#[derive(Debug, Clone, Copy)]
enum MetricsAddr {
    Off,
    At(SocketAddr),
}

fn metrics_addr(text: &str) -> Result<MetricsAddr, String> {
    if text == "off" {
        return Ok(MetricsAddr::Off);
    }
    let addr = text.parse().map(MetricsAddr::At);
    addr.map_err(|_| format!("{text:?} is neither IP:PORT nor off"))
}

/// Difference between the default port of metrics and the clients' port, as for nodes.
const METRICS_PORT_STEP: u16 = 552;

impl Arguments {
    fn options(self) -> anyhow::Result<GatewayOptions> {
        if self.sasl
            && self.tls_cert.is_none()
            && !self.listen_addr.ip().is_loopback()
            && !self.insecure
        {
            bail!(
                "--sasl without TLS shows tokens on the network; set --tls-cert and --tls-key, \
                 listen on 127.0.0.1, or add --insecure"
            );
        }
        if self.memory_mib < 2 * self.request_mib || self.request_mib == 0 {
            bail!(
                "--memory-mib is {}; it must be at least twice --request-mib, which is {}",
                self.memory_mib,
                self.request_mib
            );
        }
        let listen_is_any = self.listen_addr.ip().is_unspecified();
        if listen_is_any && self.advertised_addr.is_none() {
            bail!(
                "clients cannot dial {}; set --advertised-addr to the address that they use",
                self.listen_addr
            );
        }
        if self.auto_create_partitions == Some(0) {
            bail!("--auto-create-partitions must be at least 1");
        }
        let metrics_addr = match self.metrics_addr {
            Some(MetricsAddr::Off) => None,
            Some(MetricsAddr::At(addr)) => Some(addr),
            None => match self.listen_addr.port().checked_add(METRICS_PORT_STEP) {
                Some(port) => Some(SocketAddr::from((Ipv4Addr::LOCALHOST, port))),
                None => bail!(
                    "the default port of metrics is {} plus {METRICS_PORT_STEP}, more than 65535; \
                     set --metrics-addr to IP:PORT or off",
                    self.listen_addr.port()
                ),
            },
        };
        let token = TokenSource::from_env().context("the token of the gateway")?;
        let mut cluster = Config {
            endpoints: self.addr,
            // Each connection to a node has a limit of calls, and long polls are calls.
            connections_per_node: 4,
            token,
            ..Config::default()
        };
        if let (Some(certificate), Some(key)) = (self.cert, self.key) {
            let options = TlsOptions { ca_files: self.ca, ..TlsOptions::default() };
            cluster = cluster.with_tls(options.with_certificate(certificate, key));
        } else if !self.ca.is_empty() {
            cluster = cluster.with_tls(TlsOptions { ca_files: self.ca, ..TlsOptions::default() });
        }
        let tls = self.tls_cert.is_some().then(|| CertificateFiles {
            certificate: self.tls_cert,
            key: self.tls_key,
            ca: Vec::new(),
            client_ca: Vec::new(),
        });
        Ok(GatewayOptions {
            listen_addr: self.listen_addr,
            metrics_addr,
            advertised_addr: self.advertised_addr,
            gateways: self.gateways,
            cluster,
            tls,
            limits: GatewayLimits {
                memory_bytes: self.memory_mib << 20,
                connections: self.connections,
                request_bytes: self.request_mib << 20,
                idle_timeout: Duration::from_secs(self.idle_seconds),
                ..GatewayLimits::default()
            },
            rules: GatewayRules {
                auto_create_partitions: self.auto_create_partitions,
                requires_sasl: self.sasl,
            },
        })
    }
}

/// Exit code of a wrong configuration, as for clap's errors.
const EXIT_USAGE: u8 = 2;

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    let arguments = Arguments::parse();
    init_log();
    let exits_with_stdin = arguments.exit_with_stdin;
    let bound = match arguments.options() {
        Ok(options) => Gateway::bind(options).await,
        Err(error) => return Ok(wrong_configuration(&error)),
    };
    let gateway = match bound {
        Ok(gateway) => gateway,
        Err(error @ GatewayError::Listen { .. }) => return Err(error.into()),
        Err(error) => return Ok(wrong_configuration(&error.into())),
    };
    let addr = gateway.local_addr()?;
    let broker = gateway.state().broker();
    if let Some(metrics) = gateway.metrics_addr() {
        tracing::info!(addr = %metrics, "serving metrics and probes");
    }
    tracing::info!(%addr, advertised = %broker.address, broker = broker.node_id, "listening");
    let stop = CancellationToken::new();
    let serving = gateway.serve(stop.clone());
    tokio::pin!(serving);
    tokio::select! {
        () = &mut serving => {}
        reason = stopped(exits_with_stdin) => {
            tracing::info!(reason = reason?, "stopping");
            stop.cancel();
            serving.await;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn wrong_configuration(error: &anyhow::Error) -> ExitCode {
    eprintln!("error: {error:#}");
    ExitCode::from(EXIT_USAGE)
}

/// Writes the log to stderr, with the gateway's own lines at the level of `HELIX_KAFKA_LOG`.
fn init_log() {
    let level = match std::env::var("HELIX_KAFKA_LOG").as_deref() {
        Ok("debug") => LevelFilter::DEBUG,
        Ok("warn") => LevelFilter::WARN,
        _ => LevelFilter::INFO,
    };
    let targets =
        Targets::new().with_target("helix_kafka", level).with_default(level.min(LevelFilter::INFO));
    let lines = tracing_subscriber::fmt::layer().with_writer(io::stderr);
    let lines = lines.with_ansi(io::stderr().is_terminal());
    tracing_subscriber::registry().with(lines).with(targets).init();
}

/// Waits for a signal to stop, or for the end of standard input. Returns the reason.
async fn stopped(exits_with_stdin: bool) -> anyhow::Result<&'static str> {
    use tokio::signal::unix::{SignalKind, signal};
    let input_closed = async {
        if !exits_with_stdin {
            return std::future::pending().await;
        }
        let (closed_sender, closed) = oneshot::channel::<()>();
        // Not a task of tokio, for which the runtime would wait.
        std::thread::spawn(move || {
            // A read error ends the wait too, like the end of the input.
            let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
            drop(closed_sender);
        });
        // Always an error: the sender sends nothing and is dropped.
        drop(closed.await);
    };
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => Ok("SIGTERM"),
        _ = interrupt.recv() => Ok("SIGINT"),
        () = input_closed => Ok("end of standard input"),
    }
}
