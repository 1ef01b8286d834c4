package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/metrics"
)

const (
	// metricsAddr is what "weir serve" listens on unless it is told otherwise.
	metricsAddr = "127.0.0.1:19347"
	// healthTimeout is how long /healthz waits for the database.
	healthTimeout = 2 * time.Second
	// scrapesAtOnce bounds how many scrapes ask the database at the same time; more are told to come again.
	scrapesAtOnce = 4
)

// serveJSON is what "weir serve" tells of itself.
type serveJSON struct {
	Address string `json:"address"`
	Metrics string `json:"metrics"`
	Health  string `json:"health"`
}

func serveCommand(g *global) *cobra.Command {
	var (
		addr    string
		timeout time.Duration
	)
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Serve metrics for Prometheus",
		Long: fmt.Sprintf(`Serves metrics of all topics and groups to Prometheus over HTTP, until it is interrupted. One process an install is enough:
everything is read from the database, when Prometheus asks.

  /metrics   the metrics. A scrape takes five read-only statements. If they fail, or take longer than --timeout, the answer
             is weir_up 0
  /healthz   200 when the database answers within %v, else 503

It listens on %s; --metrics says otherwise. There is no password and no TLS: other hosts than this one reach it
when they are let, with --metrics :19347 for example. Nothing is written, and no maintenance is done.

It ends with exit code 1 when the database cannot be reached at the start. Later on it says so, in weir_up, and goes on.
What each metric means, and what to be alerted about, stands in docs/metrics.md; docs/grafana.json is a dashboard.`, healthTimeout, metricsAddr),
		Example: `  weir serve
  weir serve --metrics 10.0.0.7:19347
  curl -s http://127.0.0.1:19347/metrics | grep '^weir_group_lag'`,
		Args: arguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if _, _, err := net.SplitHostPort(addr); err != nil {
				return usageOf(cmd, "--metrics is %q, it must be HOST:PORT or :PORT", addr)
			}
			if timeout <= 0 {
				return usageOf(cmd, "--timeout is %v, it must be more than 0", timeout)
			}
			client, err := weir.Open(cmd.Context(), g.dsn, &weir.Options{Schema: g.schema, Logger: g.logger(), NoMaintenance: true, NoListen: true})
			if err != nil {
				return err
			}
			defer client.Close()
			return g.serve(cmd.Context(), client, addr, timeout)
		},
	}
	cmd.Flags().StringVar(&addr, "metrics", metricsAddr, "the address to listen on, HOST:PORT; port 0 stands for any free one")
	cmd.Flags().DurationVar(&timeout, "timeout", 5*time.Second, "how long the statements of a scrape may take; less than Prometheus's own scrape_timeout")
	return cmd
}

// serve serves metrics until ctx ends; then it lets scrapes that have begun finish.
func (g *global) serve(ctx context.Context, client *weir.Client, addr string, timeout time.Duration) error {
	registry := prometheus.NewRegistry()
	registry.MustRegister(metrics.New(client, &metrics.Options{Timeout: timeout, Logger: g.logger()}))
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{MaxRequestsInFlight: scrapesAtOnce}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, r *http.Request) {
		call, cancel := context.WithTimeout(r.Context(), healthTimeout)
		defer cancel()
		if _, err := client.MaintenanceSuspended(call); err != nil {
			http.Error(w, "the database does not answer", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	listener, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	base := "http://" + listener.Addr().String()
	info := serveJSON{Address: listener.Addr().String(), Metrics: base + "/metrics", Health: base + "/healthz"}
	err = g.print(info, func() error {
		_, err := fmt.Fprintln(g.out, info.Metrics)
		return err
	})
	if err == nil {
		err = g.out.Flush()
	}
	if err == nil {
		select {
		case err := <-served:
			return err
		case <-ctx.Done():
		}
	}
	stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout+5*time.Second)
	defer cancel()
	return errors.Join(err, server.Shutdown(stopping))
}
