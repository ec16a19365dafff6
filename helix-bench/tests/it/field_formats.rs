//! Load tests in the formats of other programs.

use serde_json::Value;

use super::{MemoryServer, number};

#[test]
fn perf_prints_the_lines_of_the_tool() {
    let (server, dir) = (MemoryServer::start(), tempfile::tempdir().unwrap());
    let flags = "perf --topic perf --create-topic 2 --num-records 1000 --record-size 100 \
                 --throughput 1000 --batch-size 16384 --reporting-interval 300 --producer-props \
                 acks=all linger.ms=2";
    let (text, result) = server.bench(dir.path(), &flags.split_whitespace().collect::<Vec<_>>());
    let lines: Vec<&str> = text.lines().collect();
    let (last, windows) = lines.split_last().unwrap();
    assert!(last.starts_with("1000 records sent, ") && last.ends_with(" ms 99.9th."), "{text}");
    assert!(!windows.is_empty(), "{text}");
    for line in windows {
        assert!(line.contains(" records/sec (") && line.ends_with(" ms max latency."), "{line}");
    }
    assert_eq!((&result["records"], &result["errors"]), (&Value::from(1000), &Value::from(0)));
    assert_eq!(result["latency_us"]["count"], 1000);
    // A second at 1,000 a second.
    assert!((0.9..5.0).contains(&number(&result["seconds"])), "{result}");
    assert_eq!(result["storage"], "memory");
}
