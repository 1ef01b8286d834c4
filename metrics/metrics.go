// Package metrics tells Prometheus how an install of Weir, and the consumers of a process, are doing. What each metric means, and
// what to be alerted about, stands in docs/metrics.md; "weir serve" is New as a program.
//
//	registry.MustRegister(metrics.New(client, nil))  // topics and groups, once an install
//	consumers := metrics.NewConsumers()              // this process's consumers
//	registry.MustRegister(consumers)
//	consumers.Add("orders", "billing", consumer)
package metrics

import (
	"cmp"
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weirhq/weir"
)

// seenWithin is how recently a consumer must have been seen to count as running. One that listens is seen now, one that holds
// something whenever it renews its leases, each 5 s by default.
const seenWithin = time.Minute

// Options are the options of a Collector. The zero value is ready to use.
type Options struct {
	// Timeout bounds one scrape. Default 5 s, negative: without limit.
	Timeout time.Duration
	// Logger is told when scrapes begin to fail, and why, and when they succeed again. Default slog.Default().
	Logger *slog.Logger
}

// Collector is a prometheus.Collector over an install of Weir: its topics, its groups, and what holds them up. All of it is read
// from the database, so one process an install is enough. It is safe for concurrent use.
type Collector struct {
	client  *weir.Client
	timeout time.Duration
	log     *slog.Logger
	failing atomic.Bool
}

// New makes a Collector. A scrape is five read-only statements, one after another. When they fail, or take longer than
// Options.Timeout, the scrape gives weir_up 0 and weir_scrape_duration_seconds, and none of the other metrics.
func New(client *weir.Client, o *Options) *Collector {
	if o == nil {
		o = &Options{}
	}
	c := &Collector{client: client, timeout: cmp.Or(o.Timeout, 5*time.Second), log: o.Logger}
	if c.log == nil {
		c.log = slog.Default()
	}
	return c
}

// metric is a metric whose value is read from a T.
type metric[T any] struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(T) float64
}

func gauge[T any](name, help string, labels []string, value func(T) float64) metric[T] {
	return metric[T]{prometheus.NewDesc(name, help, labels, nil), prometheus.GaugeValue, value}
}

func counter[T any](name, help string, labels []string, value func(T) float64) metric[T] {
	return metric[T]{prometheus.NewDesc(name, help, labels, nil), prometheus.CounterValue, value}
}

func (m metric[T]) of(v T, labels ...string) prometheus.Metric {
	return prometheus.MustNewConstMetric(m.desc, m.kind, m.value(v), labels...)
}

// install is what concerns no topic.
type install struct {
	up        bool
	took      time.Duration
	suspended bool
}

// topic is a topic with what holds it up.
type topic struct {
	weir.Topic
	blockers int
	oldest   time.Duration
}

// group is a group with its consumers.
type group struct {
	weir.Group
	consumers int
}

var (
	ofTopic = []string{"topic"}
	ofGroup = []string{"topic", "group"}

	up = gauge("weir_up", "1 if this scrape read all it wanted from the database in time, else 0.", nil,
		func(i install) float64 { return is(i.up) })
	took = gauge("weir_scrape_duration_seconds", "How long this scrape's statements took.", nil,
		func(i install) float64 { return i.took.Seconds() })
	suspended = gauge("weir_maintenance_suspended", "1 while maintenance is suspended, else 0.", nil,
		func(i install) float64 { return is(i.suspended) })

	topicMetrics = []metric[topic]{
		gauge("weir_topic_head_id", "Highest visible id. Ids can have gaps.", ofTopic,
			func(t topic) float64 { return float64(t.Head) }),
		gauge("weir_topic_unsettled_messages", "Ids from the settled head to the head: no group is given them yet.", ofTopic,
			func(t topic) float64 { return float64(max(t.Head-t.Settled, 0)) }),
		gauge("weir_topic_messages", "About how many messages the log has.", ofTopic,
			func(t topic) float64 { return float64(t.Messages) }),
		gauge("weir_topic_size_bytes", "What the log takes on disk, indexes included.", ofTopic,
			func(t topic) float64 { return float64(t.Bytes) }),
		gauge("weir_topic_segments", "Segments of the log, the one that is made ahead included.", ofTopic,
			func(t topic) float64 { return float64(t.Segments) }),
		gauge("weir_topic_blockers", "Open transactions that have produced to the topic while later messages wait behind them.", ofTopic,
			func(t topic) float64 { return float64(t.blockers) }),
		gauge("weir_topic_oldest_blocker_age_seconds", "Age of the oldest open transaction that later messages of the topic wait behind, 0 for none.", ofTopic,
			func(t topic) float64 { return t.oldest.Seconds() }),
	}

	groupMetrics = []metric[group]{
		gauge("weir_group_committed_id", "Everything at or below this id is handled, or has a delivery of its own. A seek can lower it.", ofGroup,
			func(g group) float64 { return float64(g.Committed) }),
		gauge("weir_group_lag_messages", "Ids from weir_group_committed_id to weir_topic_head_id: an upper bound of the messages still to be handled.", ofGroup,
			func(g group) float64 { return float64(g.Lag) }),
		gauge("weir_group_lag_seconds", "Age of the oldest message still to be handled, 0 for none.", ofGroup,
			func(g group) float64 { return g.LagSeconds }),
		gauge("weir_group_leases", "Ranges, shards and single messages that consumers hold.", ofGroup,
			func(g group) float64 { return float64(g.Leases) }),
		gauge("weir_group_waiting_messages", "Messages with a delivery of their own that have not failed: of a queue group all that are not handled, else those delayed, or behind an earlier one of their key.", ofGroup,
			func(g group) float64 { return float64(g.Waiting) }),
		gauge("weir_group_retrying_messages", "Messages that have failed and are to be tried again.", ofGroup,
			func(g group) float64 { return float64(g.Retrying) }),
		gauge("weir_group_dead_messages", "Dead letters.", ofGroup,
			func(g group) float64 { return float64(g.Dead) }),
		counter("weir_group_missed_messages_total", "Messages that retention removed before the group had finished them.", ofGroup,
			func(g group) float64 { return float64(g.Missed) }),
		gauge("weir_group_consumers", "Consumers seen within the last minute, and those that hold something and never say when they were seen.", ofGroup,
			func(g group) float64 { return float64(g.consumers) }),
		gauge("weir_group_paused", "1 while the group is paused, else 0.", ofGroup,
			func(g group) float64 { return is(g.PausedAt != nil) }),
	}
)

func is(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// Describe implements prometheus.Collector.
func (c *Collector) Describe(to chan<- *prometheus.Desc) {
	for _, m := range []metric[install]{up, took, suspended} {
		to <- m.desc
	}
	for _, m := range topicMetrics {
		to <- m.desc
	}
	for _, m := range groupMetrics {
		to <- m.desc
	}
}

// Collect implements prometheus.Collector.
func (c *Collector) Collect(to chan<- prometheus.Metric) {
	ctx := context.Background()
	if c.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.timeout)
		defer cancel()
	}
	began := time.Now()
	i, topics, groups, err := c.read(ctx)
	i.up, i.took = err == nil, time.Since(began)
	to <- up.of(i)
	to <- took.of(i)
	if failed := err != nil; c.failing.Swap(failed) != failed {
		if failed {
			c.log.Warn("metrics cannot be read", "error", err)
		} else {
			c.log.Info("metrics can be read again")
		}
	}
	if err != nil {
		return
	}
	to <- suspended.of(i)
	for _, t := range topics {
		for _, m := range topicMetrics {
			to <- m.of(t, t.Name)
		}
	}
	for _, g := range groups {
		for _, m := range groupMetrics {
			to <- m.of(g, g.Topic, g.Name)
		}
	}
}

// read asks the database. The statements have a snapshot each: what one lists and another does not know yet has none.
func (c *Collector) read(ctx context.Context) (i install, topics []topic, groups []group, err error) {
	since, err := c.client.MaintenanceSuspended(ctx)
	if err != nil {
		return i, nil, nil, err
	}
	i.suspended = since != nil
	blockers, err := c.client.Blockers(ctx, "")
	if err != nil {
		return i, nil, nil, err
	}
	consumers, err := c.client.Consumers(ctx, "", "")
	if err != nil {
		return i, nil, nil, err
	}
	listed, err := c.client.Topics(ctx)
	if err != nil {
		return i, nil, nil, err
	}
	for _, t := range listed {
		of := topic{Topic: t}
		for _, b := range blockers {
			if b.Topic == t.Name {
				of.blockers, of.oldest = of.blockers+1, max(of.oldest, b.Age)
			}
		}
		topics = append(topics, of)
	}
	running := map[[2]string]int{}
	for _, k := range consumers {
		if k.LastSeen == nil || time.Since(*k.LastSeen) < seenWithin {
			running[[2]string{k.Topic, k.Group}]++
		}
	}
	all, err := c.client.Groups(ctx, "")
	if err != nil {
		return i, nil, nil, err
	}
	for _, g := range all {
		groups = append(groups, group{g, running[[2]string{g.Topic, g.Name}]})
	}
	return i, topics, groups, nil
}
