{{- define "trtspec.name" -}}
{{- .Release.Name | trunc 53 | trimSuffix "-" -}}
{{- end -}}

{{- define "trtspec.selector" -}}
app.kubernetes.io/name: trtspec
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "trtspec.labels" -}}
{{ include "trtspec.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}
