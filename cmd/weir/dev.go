package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/pgtest"
)

// devPort is what "weir dev" listens on unless it is told otherwise, so that its DSN is the same the next time.
const devPort = 54329

// devJSON is what "weir dev" tells of its server.
type devJSON struct {
	DSN       string `json:"dsn"`
	SocketDSN string `json:"socket_dsn"`
	Data      string `json:"data"`
	Log       string `json:"log"`
	Version   string `json:"postgresql"`
	PID       int    `json:"pid"`
}

func devCommand(g *global) *cobra.Command {
	var (
		data string
		port int
	)
	cmd := &cobra.Command{
		Use:   "dev",
		Short: "Run a private PostgreSQL with Weir in it",
		Long: fmt.Sprintf(`Runs a private PostgreSQL server that keeps its data in a folder, installs Weir in its database "weir", prints how to
reach it, and goes on until it is interrupted. It uses the PostgreSQL binaries that are installed on this machine (or those
in the folder that %s names) and touches no other server.

It is for development: it listens on 127.0.0.1 only, where every local user can connect without a password. Commits are
durable, and the next "weir dev" with the same folder goes on with the same data. It listens on port %d, or on a free one
when that is taken; --port chooses another, 0 stands for any free one. As root, the server runs as the user "postgres" or
"nobody", who must be able to reach the folder.`, pgtest.BinEnv, devPort),
		Example: `  weir dev
  weir dev --data /var/tmp/weir --port 5433
  weir dev --output json                  # {"dsn": "postgres://...", ...}`,
		Args: arguments,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			ctx := cmd.Context()
			if port < 0 || port > 65535 {
				return usageOf(cmd, "--port is %d, it must be from 0 to 65535", port)
			}
			if !cmd.Flags().Changed("port") && !free(port) {
				port = 0
			}
			g.note("starting PostgreSQL, data in %s", data)
			server, err := pgtest.Start(ctx, &pgtest.Options{DataDir: data, TCP: true, Port: port})
			if ctx.Err() != nil {
				return errors.New("interrupted before the server was up")
			}
			if err != nil {
				return err
			}
			defer func() {
				stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
				defer cancel()
				err = errors.Join(err, server.Stop(stopping))
			}()
			var exists *pgconn.PgError
			if err := server.CreateDatabase(ctx, "weir"); err != nil && (!errors.As(err, &exists) || exists.Code != "42P04") {
				return err
			}
			dsn := server.TCPDSN("weir")
			client, err := weir.Open(ctx, dsn, &weir.Options{Schema: g.schema, Logger: g.logger(), Migrate: true})
			if err != nil {
				return err
			}
			client.Close()
			info := devJSON{
				DSN: dsn, SocketDSN: server.DSN("weir"), Data: server.DataDir(), Log: server.LogPath(),
				Version: server.Binaries().Version, PID: server.PID(),
			}
			err = g.print(info, func() error {
				if g.quiet {
					_, err := fmt.Fprintln(g.out, info.DSN)
					return err
				}
				_, err := fmt.Fprintf(g.out, "PostgreSQL %s is up, with Weir in it. Its log is %s\n\n  export WEIR_DSN=%s\n\nCtrl-C stops it; the data stays in %s\n",
					info.Version, info.Log, paint(g.colorOut, bold, "'"+info.DSN+"'"), info.Data)
				return err
			})
			if err == nil {
				err = g.out.Flush()
			}
			if err != nil {
				return err
			}
			watch := time.NewTicker(time.Second)
			defer watch.Stop()
			for {
				select {
				case <-ctx.Done():
					g.note("stopping PostgreSQL")
					return nil
				case <-watch.C:
					if server.PID() == 0 {
						return fmt.Errorf("the server has ended by itself; the end of its log:\n%s", server.LogTail(20))
					}
				}
			}
		},
	}
	cmd.Flags().StringVar(&data, "data", ".weir", "the folder that keeps the data; it is made when it is missing")
	cmd.Flags().IntVar(&port, "port", devPort, "the TCP port to listen on, 0 for any free one")
	return cmd
}

// free reports whether a port can be listened on.
func free(port int) bool {
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return false
	}
	return l.Close() == nil
}
