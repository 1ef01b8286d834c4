package metrics

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weirhq/weir"
)

// Consumers is a prometheus.Collector over consumers of this process: weir.Consumer.Stats, summed by topic and group. It asks no
// database. It is safe for concurrent use.
type Consumers struct {
	mu   sync.Mutex
	list map[[2]string][]*weir.Consumer
}

// NewConsumers makes a Consumers. Add gives it what it shows.
func NewConsumers() *Consumers { return &Consumers{list: map[[2]string][]*weir.Consumer{}} }

// Add adds a consumer of a topic's group. It stays, also after its Run has ended: a counter does not go back.
func (c *Consumers) Add(topic, group string, consumer *weir.Consumer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	of := [2]string{topic, group}
	c.list[of] = append(c.list[of], consumer)
}

var consumerMetrics = []metric[weir.ConsumerStats]{
	counter("weir_consumer_handled_messages_total", "Messages handled by this process.", ofGroup,
		func(s weir.ConsumerStats) float64 { return float64(s.Handled) }),
	counter("weir_consumer_failed_attempts_total", "Attempts that ended with an error, a panic or a time limit.", ofGroup,
		func(s weir.ConsumerStats) float64 { return float64(s.Failed) }),
	counter("weir_consumer_lost_leases_total", "Leases that expired or were taken away before they were acknowledged.", ofGroup,
		func(s weir.ConsumerStats) float64 { return float64(s.Lost) }),
	gauge("weir_consumer_buffered_messages", "Messages that are claimed and not finished.", ofGroup,
		func(s weir.ConsumerStats) float64 { return float64(s.Buffered) }),
	gauge("weir_consumer_executing_handlers", "Handlers that run.", ofGroup,
		func(s weir.ConsumerStats) float64 { return float64(s.Executing) }),
	gauge("weir_consumer_hung_handlers", "Handlers that have ignored the end of their context and lost their place.", ofGroup,
		func(s weir.ConsumerStats) float64 { return float64(s.Hung) }),
}

// Describe implements prometheus.Collector.
func (c *Consumers) Describe(to chan<- *prometheus.Desc) {
	for _, m := range consumerMetrics {
		to <- m.desc
	}
}

// Collect implements prometheus.Collector.
func (c *Consumers) Collect(to chan<- prometheus.Metric) {
	sums := map[[2]string]weir.ConsumerStats{}
	c.mu.Lock()
	for of, list := range c.list {
		var sum weir.ConsumerStats
		for _, k := range list {
			s := k.Stats()
			sum.Handled += s.Handled
			sum.Failed += s.Failed
			sum.Lost += s.Lost
			sum.Buffered += s.Buffered
			sum.Executing += s.Executing
			sum.Hung += s.Hung
		}
		sums[of] = sum
	}
	c.mu.Unlock()
	for of, sum := range sums {
		for _, m := range consumerMetrics {
			to <- m.of(sum, of[0], of[1])
		}
	}
}
