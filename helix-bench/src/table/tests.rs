//! Tests of tables.

use super::*;

fn result() -> Value {
    serde_json::json!({
        "mode": "pubsub",
        "title": "pubsub: one row",
        "rows": [{
            "payload_bytes": 1024, "messages_per_sec": 12345.6, "messages": 1000,
            "payload_bytes_per_sec": 12_641_894.4, "lost": 1, "doubled": 0,
            "run": {
                "load": { "batch_size": 32 },
                "latency_us": { "mean": 1500.0, "p50": 1000.0, "p95": 2000.0, "p99": 3000.0 },
                "latency_parts_us": {},
            },
        }],
        "notes": ["a note"],
    })
}

#[test]
fn table_of_a_result_is_aligned() {
    let text = plain(&result()).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "pubsub: one row");
    assert!(lines[2].starts_with("payload  batch  messages/s"), "{text}");
    assert!(lines[3].starts_with("  1 KiB     32      12,346  12.6    1.500"), "{text}");
    assert!(lines[3].ends_with("        -     1,000     1        0"), "{text}");
    assert_eq!((lines[2].len(), lines[4]), (lines[3].len(), "note: a note"));
}

#[test]
fn markdown_has_as_many_columns_in_each_row() {
    let text = tables(&result(), &KnownLimits::default()).unwrap()[0].markdown();
    let columns: Vec<usize> = text.lines().skip(2).map(|line| line.matches('|').count()).collect();
    assert_eq!(columns, [14, 14, 14], "{text}");
}

#[test]
fn runs_of_one_load_share_a_table() {
    let run = |clients: u64| {
        serde_json::json!({
            "records_per_sec": 1000.0, "mb_per_sec": 1.024, "errors": 0, "node_count": 1,
            "storage": "memory", "latency_us": { "p50": 100.0, "p99": 200.0, "p999": 300.0 },
            "load": { "mode": "write", "clients": clients, "size": 1024, "batch_size": 100 },
        })
    };
    let tables = tables_of_all(&[run(16), result(), run(4)], &[]).unwrap();
    assert_eq!((tables.len(), tables[1].rows.len()), (2, 2));
    let cells = ["write", "memory", "1", "4", "1 KiB x 100", "1,000", "1.0"];
    assert_eq!(tables[1].rows[0][..7], cells);
}

#[test]
fn perf_is_no_row_of_writes() {
    let perf = serde_json::json!({
        "mode": "perf", "records_per_sec": 1000.0, "mib_per_sec": 1.0, "errors": 2,
        "node_count": 1, "storage": "disk", "batch_bytes": 65536,
        "latency_us": { "p50": 100.0, "p99": 200.0, "p999": 300.0 },
        "load": { "mode": "write", "clients": 1, "size": 1024, "batch_size": 1 },
    });
    let tables = tables_of_all(&[perf], &[]).unwrap();
    assert_eq!(tables.len(), 1);
    let cells = ["perf", "disk", "1", "1 KiB", "64 KiB", "1,000", "1", "0.100"];
    assert_eq!(tables[0].rows[0][..8], cells);
    assert_eq!(tables[0].rows[0].last().unwrap(), "2");
}

#[test]
fn limits_add_their_columns() {
    let run = |storage: &str, mb_per_sec: f64| {
        let load = serde_json::json!({ "mode": "write", "clients": 4, "size": 1024 });
        serde_json::json!({ "storage": storage, "mb_per_sec": mb_per_sec, "load": load })
    };
    let log = serde_json::json!({ "mode": "wal", "storage": "disk", "mb_per_sec": 300.0 });
    let results = [run("disk", 150.0), run("none", 600.0)];
    let tables = tables_of_all(&results, &[log]).unwrap();
    // Ordered by storage.
    assert_eq!(tables[0].rows[0][11..], ["600", "300", "0.50"]);
    assert_eq!(tables[0].rows[1][11..], ["-", "-", "-"]);
    assert_eq!(tables[0].columns.len(), tables[0].rows[0].len());
}

#[test]
fn pubsub_rows_have_their_own_ceiling() {
    let mut result = result();
    result["rows"][0]["ceiling"] = serde_json::json!({ "payload_bytes_per_sec": 25_283_788.8 });
    let table = &tables(&result, &KnownLimits::default()).unwrap()[0];
    assert_eq!(table.columns[13..], ["ceiling MB/s", "log MB/s", "of the lower"]);
    assert_eq!(table.rows[0][13..], ["25.3", "-", "0.50"]);
}

#[test]
fn parts_of_groups_share_a_table() {
    let part = |name: &str| {
        let row = serde_json::json!({ "name": name, "unit": "ms", "value": 1.0, "values": [1.0] });
        serde_json::json!({ "mode": "group", "title": "t", "rows": [row], "notes": ["n"] })
    };
    let tables = tables_of_all(&[part("read"), part("commit"), part("read")], &[]).unwrap();
    let rows: Vec<usize> = tables.iter().map(|table| table.rows.len()).collect();
    assert_eq!(rows, [2, 1], "a second run of a part has a table of its own");
    assert_eq!(tables[0].notes, ["n"]);
}

#[test]
fn workload_in_the_format_of_omb_has_a_table() {
    let result = serde_json::json!({
        "workload": "1-topic", "driver": "Helix", "messageSize": 1024,
        "publishRate": [900.0, 1100.0], "consumeRate": [1000.0, 1000.0],
        "aggregatedPublishLatencyAvg": 1.5, "aggregatedPublishLatency50pct": 1.25,
        "aggregatedPublishLatency99pct": 4.0,
    });
    check(&result).unwrap();
    let tables = tables_of_all(&[result], &[]).unwrap();
    let cells = ["1-topic", "1 KiB", "1,000", "1,000", "1.250", "4.000", "-", "-"];
    assert_eq!(tables[0].rows, [cells]);
}

#[test]
fn result_of_an_unknown_mode_is_rejected() {
    let error = plain(&serde_json::json!({ "mode": "other" })).unwrap_err();
    assert_eq!(error.to_string(), "no table for a result of mode other");
}
