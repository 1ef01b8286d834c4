package metrics_test

import (
	"context"
	"log"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/metrics"
)

// A program that consumes, and serves the metrics of what it does and of the whole install.
func Example() {
	ctx := context.Background()
	client, err := weir.Open(ctx, "", nil)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	consumer, err := client.NewConsumer("orders", "billing", weir.Handle(func(context.Context, *weir.Received[[]byte]) error { return nil }), nil)
	if err != nil {
		log.Fatal(err)
	}
	consumers := metrics.NewConsumers()
	consumers.Add("orders", "billing", consumer)
	prometheus.MustRegister(metrics.New(client, nil), consumers)
	go func() { log.Print(http.ListenAndServe("127.0.0.1:2112", promhttp.Handler())) }()
	if err := consumer.Run(ctx); err != nil {
		log.Print(err)
	}
}
