//! Appends and fetches through a whole server in this process, over loopback gRPC.
//! `helix-bench` measures the product; this benchmark shows the effect of a change quickly.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use helix_client::{Client, FetchOptions, Position, ProducerOptions, ReadStart};
use helix_proto::log::v1::{EncodedBatch, Record};
use helix_server::config::ServerConfig;
use helix_server::server::{RunningServer, Server};
use tokio::runtime::Runtime;

const RECORDS: usize = 100;
const RECORD_BYTES: usize = 1024;

fn batch() -> EncodedBatch {
    let value = vec![0x61; RECORD_BYTES];
    let record = || Record { value: Some(value.clone().into()), ..Record::default() };
    let records: Vec<Record> = (0..RECORDS).map(|_| record()).collect();
    helix_proto::batch::encode(&records)
}

async fn start(mut config: ServerConfig) -> (RunningServer, Client) {
    config.listen_addr = "127.0.0.1:0".parse().expect("an address");
    // Bounded, or a long measurement would fill the disk.
    config.default_retention_bytes = 256 << 20;
    let running = Server::start(config).await.expect("it starts");
    let client = Client::new(helix_client::Config::new([running.local_addr().to_string()]));
    (running, client.expect("the configuration is valid"))
}

fn throughput(criterion: &mut Criterion) {
    let runtime = Runtime::new().expect("a runtime");
    let directory = tempfile::tempdir().expect("a directory");
    let mut group = criterion.benchmark_group("server");
    group.throughput(Throughput::Bytes((RECORDS * RECORD_BYTES) as u64));
    group.measurement_time(Duration::from_secs(5));
    for (name, config) in
        [("memory", ServerConfig::in_memory()), ("durable", ServerConfig::in_dir(directory.path()))]
    {
        let (running, client) = runtime.block_on(start(config));
        let producer = client.producer(ProducerOptions::default());
        let batch = batch();
        let next = AtomicU64::new(0);
        group.bench_function(BenchmarkId::new("append", name), |bencher| {
            bencher.iter(|| {
                let ack = runtime.block_on(producer.append("default", 0, batch.clone()));
                let ack = ack.expect("it is appended");
                next.store(ack.next_offset.unwrap_or_default(), Ordering::Relaxed);
            });
        });
        let last = next.load(Ordering::Relaxed).saturating_sub(RECORDS as u64);
        group.bench_function(BenchmarkId::new("fetch", name), |bencher| {
            let consumer = client.consumer();
            let options = FetchOptions::default();
            let start = [ReadStart::new("default", 0, Position::Offset(last))];
            bencher.iter(|| {
                let fetched = consumer.fetch_encoded(&start, &options);
                assert!(!runtime.block_on(fetched).expect("it is read")[0].batches.is_empty());
            });
        });
        runtime.block_on(running.shutdown());
    }
    group.finish();
}

criterion_group!(benches, throughput);
criterion_main!(benches);
